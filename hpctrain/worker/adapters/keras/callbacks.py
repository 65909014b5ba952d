"""Callbacks for ``fit``: equal weights at the start, metrics over all ranks, recorded steps, guard."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.keras.distribution import distribution_of
from hpctrain.worker.adapters.keras.metrics import join_logs, join_metrics, metrics_of
from hpctrain.worker.adapters.keras.reduction import distributed_optimizers, reduction_of, synchronise
from hpctrain.worker.adapters.keras.variables import broadcast, guard_of
from hpctrain.worker.adapters.recording import Recording, recording
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.models.keras_batch_norm import average_statistics


class _OnRanks(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that needs the other ranks."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm


class Broadcast(_OnRanks):
    """Broadcasts the weights and the optimizer state of rank 0 to every rank when training begins."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        distributed = distributed_optimizers(self.model)
        for optimizer in distributed:
            synchronise(self.model, optimizer)
        if not distributed:
            # Not every wrapper of an optimizer can list its variables. The guard compares the parameters later.
            broadcast(self._comm, self.model)


class Restored(Broadcast):
    """Passes on to every rank what BackupAndRestore restored on one rank."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.model._initial_epoch = self._comm.broadcast_object(self.model._initial_epoch)


class JoinMetrics(_OnRanks):
    """Writes the metrics over all ranks' samples into the logs of an epoch, validation included.

    The moving statistics of batch normalisation become the mean over the ranks before validation and an epoch's end.
    """

    _results: dict[str, Any] | None = None
    _validated: dict[str, Any]
    _training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._results, self._validated = None, {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation starts from the same metric objects, so the epoch's own state has to be taken here.
        average_statistics(self.model, self._comm)
        if self._training:
            self._results = join_metrics(self._comm, self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        results = join_metrics(self._comm, self.model)
        if logs:
            join_logs(self._comm, logs, results)
            self._validated = {f"val_{name}": value for name, value in logs.items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # What is saved or evaluated from here on is the same on every rank.
        average_statistics(self.model, self._comm)
        results = join_metrics(self._comm, self.model) if self._results is None else self._results
        if logs:
            trained = {name: value for name, value in logs.items() if name not in self._validated}
            join_logs(self._comm, trained, results)
            logs.update(trained | {name: self._validated[name] for name in logs if name in self._validated})


class JoinBatches(_OnRanks):
    """Writes what the metrics come to on all ranks' samples into the logs of a batch, and leaves their states alone."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        own = [(each, each.value.numpy()) for metric in metrics_of(self.model) for each in metric.variables]
        results = join_metrics(self._comm, self.model)
        for variable, value in own:
            variable.assign(value)
        if logs:
            join_logs(self._comm, logs, results)


class RecordSteps(_OnRanks):
    """Records each batch as a step with its learning rate, and the joined metrics of an epoch."""

    _counted: Recording | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        own = recording()
        # Not count_params(), which fails for a model that is only called by its parts.
        parameters = sum(math.prod(weight.shape) for weight in self.model.weights)
        if own and own.begin_run(self._comm, "keras", self.model, parameters):
            self._counted = own

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._counted:
            optimizer = self.model.optimizer
            if reduction_of(optimizer) is None:
                # A GAN has optimizers of its own, and the one that compile makes is never used.
                optimizer = next(iter(distributed_optimizers(self.model)), optimizer)
            rate = None if optimizer is None else float(optimizer.learning_rate)
            self._counted.step_done(rate)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        if self._counted and values:
            # Quiet because fit prints the metrics itself.
            self._counted.log(values, quiet=True)


class GuardParameters(_OnRanks):
    """Stops the run if ranks hold different parameters, with any optimizer."""

    _guard: Guard

    def __init__(self, comm: Communicator, every: int) -> None:
        super().__init__(comm)
        self._every = every

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._guard = guard_of(self._comm, self.model, every=self._every)
        self._take_over(True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._guard.step_done()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._take_over(False)
        # The ranks of a short run may have drifted apart since the check of the first step.
        self._guard.check()

    def _take_over(self, guarded: bool) -> None:
        """Its optimizers have a guard for loops without ``fit``; one of the two is enough."""
        if distribution := distribution_of(self.model):
            distribution.reduction.guarded = guarded


class StopTogether(_OnRanks):
    """Stops all ranks when a callback of one of them asks for it; otherwise they would wait for that rank.

    Args:
        each_batch: whether callbacks may ask after any batch, as TerminateOnNaN does.
    """

    def __init__(self, comm: Communicator, *, each_batch: bool) -> None:
        super().__init__(comm)
        self._each_batch = each_batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._each_batch:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree()

    def _agree(self) -> None:
        stops = self._comm.allreduce(np.array([self.model.stop_training], dtype=np.int64), "max")
        self.model.stop_training = bool(stops[0])


def callbacks(*, guard_every: int = 100, comm: Communicator | None = None) -> list[keras.callbacks.Callback]:
    """The callbacks that ``fit`` needs on several ranks. Your own come after the metrics are joined, however listed.

    ``fit`` of a distributed model adds them by itself if none of them are among its callbacks. Callbacks that write
    files (ModelCheckpoint, BackupAndRestore, CSVLogger and TensorBoard) and would write to the same path act on the
    first rank only, and what BackupAndRestore reads there reaches every rank.

    Parameters are the same on one rank and on several, to rounding. What a layer computes from the samples of a rank is
    not: BatchNormalization normalises over a rank's part of a batch (over all ranks with ``synchronized=True``), and
    Dropout draws its own mask on each rank. The moving statistics of batch normalisation become the mean over the ranks
    at the end of an epoch and before validation, so that every rank evaluates and saves one model.

    Args:
        guard_every: batches between two checks that all ranks hold equal parameters; the first batch is always checked.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
    """
    comm = comm or current()
    return [Broadcast(comm), JoinMetrics(comm), RecordSteps(comm), GuardParameters(comm, guard_every)]
