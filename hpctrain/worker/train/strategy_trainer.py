"""A recipe's model and optimizer in Keras 3, made in the scope of a tf.distribute strategy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.keras.variables import all_finite
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.tf_distribute import ParameterServerCommunicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.keras_trainer import KerasTrainer
from hpctrain.worker.train.state import LazyState

# Steps scheduled for each worker: one that it computes, and one whose samples are ready when that is done.
_STEPS_A_WORKER = 2


class StrategyTrainer(KerasTrainer):
    """Replicas within one process: a step's samples are divided over them, and Keras adds their gradients up.

    Its communicator has a strategy with a scope, and is one of a single rank.
    """

    communication_seconds = 0.0

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        assert comm.strategy is not None
        self._strategy = comm.strategy
        self._clip_norm = recipe.optimizer.clip_norm
        with self._strategy.scope():
            super().__init__(recipe, comm)

    def _connect(self, recipe: Recipe) -> None:
        # Variables must exist on every replica before the first step, which cannot make them.
        self._optimizer.build(self.model.trainable_variables)
        # Keras would clip each replica's part of the gradients before it adds them up.
        self._optimizer.global_clipnorm = None

    def _traced_step(self, images: tf.Tensor, labels: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def part() -> tuple[tf.Tensor, list[tf.Tensor]]:
            replica, replicas = _place()
            samples = tf.shape(images)[0]
            own = slice(samples * replica // replicas, samples * (replica + 1) // replicas)
            return self._gradients(images[own], labels[own], scale)

        losses, gradients = self._strategy.run(part)
        finite, factor = self._checked(gradients)

        def apply(own: list[tf.Tensor]) -> None:
            self._optimizer.apply([factor * each for each in own], self.model.trainable_variables)

        def update() -> None:
            # A second run, because an update cannot be left out within the first.
            self._strategy.run(apply, (gradients,))

        def leave_out() -> None:
            self._own_finite.assign(False)

        tf.cond(finite, update, leave_out)
        return self._sum(losses), finite

    def _checked(self, gradients: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the replicas' gradients are finite, and what clipping multiplies them by."""
        if self._clip_norm is None:
            each = [local for own in gradients for local in self._strategy.experimental_local_results(own)]
            return all_finite(each), tf.constant(1.0)
        norm = tf.linalg.global_norm([self._sum(own) for own in gradients])
        return tf.math.is_finite(norm), tf.minimum(1.0, self._clip_norm / norm)

    def _sum(self, value: Any) -> tf.Tensor:
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)


def _place() -> tuple[int, int]:
    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group, context.num_replicas_in_sync


class ParameterServerTrainer(StrategyTrainer):
    """Workers that compute whole steps at the same time, with gradients of parameters that are some updates old.

    ``loss`` is that of the newest finished step. The first :meth:`step` waits for its own loss; later ones wait only
    while every worker has two steps scheduled.
    """

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        assert isinstance(comm, ParameterServerCommunicator)
        super().__init__(recipe, comm)
        self._servers = comm
        self._under_way: deque[Any] = deque()
        self._newest: Any = None

    def state(self) -> LazyState:
        self._end_steps()
        return super().state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._end_steps()
        super().restore(state)

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        self._end_steps()
        return super().evaluate(samples)

    def _call(self, graph: Callable[..., Any], arguments: tuple[tf.Tensor, ...], *, updates: bool) -> Any:
        if not updates:
            return super()._call(graph, arguments, updates=updates)
        self._under_way.append(self._servers.coordinator.schedule(graph, args=arguments))
        if self._newest is None or len(self._under_way) > _STEPS_A_WORKER * self._servers.workers:
            self._newest = self._servers.fetch(self._under_way.popleft())
        return self._newest

    def _end_steps(self) -> None:
        """Wait for all scheduled steps."""
        while self._under_way:
            self._newest = self._servers.fetch(self._under_way.popleft())
