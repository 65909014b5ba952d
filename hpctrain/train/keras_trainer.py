"""A recipe's model and optimizer in Keras 3 on TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain import models
from hpctrain.adapters.keras import distribute
from hpctrain.adapters.keras.optimizer import reduction_of
from hpctrain.adapters.keras.variables import guard_of
from hpctrain.comm import Communicator
from hpctrain.comm.graph_errors import unwrapped
from hpctrain.data.samples import Samples
from hpctrain.optim.keras_sgd import MomentumSGD
from hpctrain.recipes.schema import Optimizer, Recipe
from hpctrain.train.checkpoint import State
from hpctrain.train.trainer import Timeline

Part = tuple[Any, Any]

# To be undone: the number of updates before, and what was changed since.
_NOTHING: tuple[int, list[tuple[keras.Variable, tf.Tensor]]] = (-1, [])
# PyTorch's; Keras' own is 1e-7.
_EPSILON = 1e-8


class KerasTrainer:
    """The Keras side of :class:`hpctrain.train.trainer.Trainer`."""

    framework = "keras"
    # Keras hands over all gradients at once: there is nothing to overlap.
    timeline: Timeline = ()

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        # A GPU a rank or none at all: NCCL does not let two ranks share one.
        gpus = tf.config.list_physical_devices("GPU")
        own = slice(comm.local_rank, comm.local_rank + 1) if len(gpus) >= comm.local_size else slice(0)
        tf.config.set_visible_devices(gpus[own], "GPU")
        keras.utils.set_random_seed(recipe.seed)
        self.model, self._optimizer = distribute(
            models.build(recipe.model.name, "keras"),
            make_optimizer(recipe.optimizer),
            comm=comm,
            compression=recipe.communication.compression,
            guard_every=recipe.guard.every,
        )
        reduction = reduction_of(self._optimizer)
        assert reduction is not None
        self._reduction = reduction
        # Inside the graph it could stop an update half-way.
        self._reduction.guarded = True
        self._guard = guard_of(comm, self.model, every=recipe.guard.every)
        self.updates = 0
        self.loss = 0.0
        self._remembers = recipe.fault_tolerance.heals
        self._before = _NOTHING
        self.parameters = sum(int(tf.size(weights.value)) for weights in self.model.trainable_variables)
        # Batches differ by a sample or so: one graph for all of them.
        self._step = tf.function(self._traced_step, reduce_retracing=True)
        self._evaluate = tf.function(self._traced_evaluation, reduce_retracing=True)

    @property
    def communication_seconds(self) -> float:
        return float(self._reduction.waited)

    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float) -> float:
        if self._remembers:
            self._before = (self.updates, self._of_forward())
        self._optimizer.learning_rate.assign(learning_rate)
        tensors = [(tf.constant(part.images), tf.constant(part.labels)) for part in parts]
        with unwrapped():
            self.loss = float(self._step(tensors, tf.constant(scale, dtype=self.model.compute_dtype)))
        self.updates += 1
        self._guard.step_done()
        return self.loss

    def rebuild(self) -> None:
        self._guard.restart()
        updates, values = self._before
        if updates == self.updates:
            for variable, value in values:
                variable.assign(value)

    def average_statistics(self) -> None:
        pass

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        loss_sum, correct = self._evaluate(tf.constant(samples.images), tf.constant(samples.labels))
        return float(loss_sum), int(correct)

    def state(self) -> State:
        return {name: np.asarray(variable.value) for name, variable in self._variables().items()}

    def restore(self, state: State) -> None:
        self._before = _NOTHING
        variables = self._variables()
        if odd := sorted(variables.keys() ^ state.keys()):
            raise ValueError(f"{odd[0]} is on one side only")
        for name, variable in variables.items():
            variable.assign(state[name])

    def _of_forward(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """What a graph that fails in its reduction may have changed: all but parameters and what follows from them."""
        variables = [*self.model.non_trainable_variables, self._optimizer.iterations]
        return [(variable, tf.identity(variable.value)) for variable in variables]

    def _variables(self) -> dict[str, keras.Variable]:
        """All that the next step depends on, layers' random states included: they are variables of the model."""
        # Several layers may give their variables the same path.
        model = {f"model.{i}.{variable.path}": variable for i, variable in enumerate(self.model.variables)}
        optimizer = {f"optimizer.{i}.{variable.path}": variable for i, variable in enumerate(self._optimizer.variables)}
        return model | optimizer

    def _traced_step(self, parts: list[Part], scale: tf.Tensor) -> tf.Tensor:
        weights = self.model.trainable_variables
        losses, gradients = [], []
        for images, labels in parts:
            with tf.GradientTape() as tape:
                loss = scale * _loss_sum(self.model(images, training=True), labels)
            losses.append(loss)
            gradients.append(tape.gradient(loss, weights))
        self._optimizer.apply([tf.add_n(each) for each in zip(*gradients, strict=True)], weights)
        return tf.add_n(losses)

    def _traced_evaluation(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(images, training=False)
        correct = tf.math.count_nonzero(tf.argmax(logits, axis=1) == labels)
        return _loss_sum(logits, labels), correct


def make_optimizer(settings: Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that a recipe names; sgd's decay is an L2 term, adamw's is decoupled."""
    rate, clip = settings.learning_rate, settings.clip_norm
    match settings.name:
        case "sgd":
            return MomentumSGD(
                rate, settings.momentum, settings.nesterov, l2=settings.weight_decay, global_clipnorm=clip
            )
        case "adam":
            return keras.optimizers.Adam(rate, epsilon=_EPSILON, global_clipnorm=clip)
        case "adamw":
            return keras.optimizers.AdamW(
                rate, epsilon=_EPSILON, weight_decay=settings.weight_decay, global_clipnorm=clip
            )
        case _:
            raise NotImplementedError


def _loss_sum(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
