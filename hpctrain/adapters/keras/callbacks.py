"""Callbacks for ``fit``: equal weights at the start, metrics over all ranks, the guard, the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hpctrain.adapters.guard import Guard
from hpctrain.adapters.keras.metrics import join_logs, join_metrics
from hpctrain.adapters.keras.optimizer import reduction_of, scale_alike, synchronise
from hpctrain.adapters.keras.variables import broadcast, guard_of
from hpctrain.comm import Communicator, current


class Broadcast(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank the weights and the optimizer state of rank 0 as training begins."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        if reduction_of(optimizer):
            scale_alike(optimizer)
            synchronise(self.model, optimizer)
        else:
            # Not every wrapper of an optimizer can list its variables; the guard will judge what it does.
            broadcast(self._comm, self.model)


class JoinMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Puts the metrics of all ranks' samples into the logs of an epoch, those of validation included."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._results: dict[str, Any] | None = None
        self._training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._results = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation starts from the same metric objects, so the epoch's own state has to be taken here.
        if self._training:
            self._results = join_metrics(self._comm, self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        results = join_metrics(self._comm, self.model)
        if self._results is not None:
            self._results |= {f"val_{name}": value for name, value in results.items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        results = join_metrics(self._comm, self.model) if self._results is None else self._results
        if logs:
            join_logs(self._comm, logs, results)


class GuardParameters(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops a run whose ranks hold different parameters, whatever optimizer it uses."""

    def __init__(self, comm: Communicator, every: int) -> None:
        super().__init__()
        self._comm = comm
        self._every = every
        self._guard: Guard | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._guard = guard_of(self._comm, self.model, every=self._every)
        self._take_over(True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._guard is not None
        self._guard.step_done()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._take_over(False)

    def _take_over(self, guarded: bool) -> None:
        """The optimizer has a guard for loops without ``fit``; one of the two is enough."""
        reduction = reduction_of(self.model.optimizer)
        if reduction:
            reduction.guarded = guarded


class LearningRateSchedule(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate before each batch.

    Args:
        schedule: gives the rate of the step that follows ``n`` updates, such as
            :class:`hpctrain.optim.schedule.LearningRate`.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self._schedule = schedule

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = self._schedule(int(optimizer.iterations))


def callbacks(
    *,
    guard_every: int = 100,
    schedule: Callable[[int], float] | None = None,
    comm: Communicator | None = None,
) -> list[keras.callbacks.Callback]:
    """The callbacks that ``fit`` needs on several ranks; put them before your own, which then see joined metrics.

    ``evaluate`` takes them too, but returns this rank's own numbers, which Keras picks up before its callbacks end.
    ``model.get_metrics_result()`` right after it gives those of all ranks.

    Args:
        guard_every: batches between two proofs that all ranks hold equal parameters; the first batch is always
            checked.
        schedule: gives the learning rate of the step that follows ``n`` updates; none leaves the rate alone.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
    """
    comm = comm or current()
    chosen: list[keras.callbacks.Callback] = [Broadcast(comm), JoinMetrics(comm), GuardParameters(comm, guard_every)]
    if schedule:
        chosen.append(LearningRateSchedule(schedule))
    return chosen
