"""A recipe's model and optimizer in Keras 3 on TensorFlow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import MOMENTS, RANDOM, STATISTICS
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sync import is_local
from hpctrain.worker import models
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.keras.optimizer import TYPES
from hpctrain.worker.adapters.keras.variables import all_finite, broadcast, guard_of
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.engines import wire_of
from hpctrain.worker.comm.graph_errors import original_errors_raised
from hpctrain.worker.comm.rank_gpus import place_at_gpus
from hpctrain.worker.comm.tf_distribute import take_gpu
from hpctrain.worker.data.samples import NO_LABEL, Samples
from hpctrain.worker.models.convert import load_state, state_of
from hpctrain.worker.models.keras_batch_norm import average_statistics, begin_part
from hpctrain.worker.models.pretrained import begin_with
from hpctrain.worker.train.keras_rules import make_optimizer
from hpctrain.worker.train.local_steps import OuterStep
from hpctrain.worker.train.state import GUARD_STEPS, LazyState
from hpctrain.worker.train.trainer import NOTHING, Trainer

_POLICY = {"float32": "float32", "bf16": "mixed_bfloat16"}


class KerasTrainer(Trainer):
    """The Keras side of :class:`hpctrain.worker.train.trainer.Trainer`."""

    framework = "keras"

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        if comm.strategy is None:
            take_gpu(*place_at_gpus(comm))
        details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
        self.gpu: str | None = next((each.get("device_name") for each in details), None)
        keras.utils.set_random_seed(recipe.seed)
        super().__init__(recipe, comm)
        self.model = _build(recipe, comm)
        self._optimizer = make_optimizer(recipe.optimizer, self.model)
        self._connect(recipe)
        self._guard = guard_of(comm, self.model, every=recipe.guard.every)
        # Of the last step whose update was left out.
        self._own_finite = tf.Variable(True)
        self.outer = OuterStep(self, recipe.sync.outer) if is_local(recipe.sync) else None
        self.parameters = sum(int(tf.size(weights.value)) for weights in self.model.trainable_variables)
        self._mean, self._deviation = (
            tf.constant(255 * np.array(each, np.float32)) for each in (recipe.images.mean, recipe.images.deviation)
        )
        self._smoothing = recipe.label_smoothing
        self._has_transition = recipe.optimizer.transition is not None
        self._clips = recipe.optimizer.clip_norm is not None
        # Sums of a step's micro-batch gradients, made at the first step with several micro-batches.
        self._sums: list[tf.Variable] = []
        self._graphs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def _connect(self, recipe: Recipe) -> None:
        """Begin with rank 0's variables on all ranks."""
        broadcast(self._comm, self.model, self._optimizer)
        self._engine, self._wire = self._comm.tensorflow(), wire_of(recipe.communication.compression, TYPES)
        # Seconds between the last gradient and the last mean of the last reduction.
        self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @property
    def guard(self) -> Guard:
        return self._guard

    @property
    def communication_seconds(self) -> float:
        return self._averaging_seconds if self.alone else float(self._waited)

    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float, sgd_share: float) -> float:
        self._averaging_seconds = 0.0
        if self._remembers:
            self._before = (self.updates, self._forward_state())
        # Called before the graph, which contains the update.
        self.before_update()
        self._optimizer.learning_rate.assign(learning_rate)
        if self._has_transition:
            self._optimizer.sgd_share.assign(sgd_share)
        with original_errors_raised():
            if count == 1:
                (part,) = parts
                begin_part(self.model, 1, 1)
                loss, finite = self._run(self._traced_step, part, tf.constant(scale, tf.float32))
                self.loss = float(loss)
            else:
                self.loss, finite = self._accumulated(parts, count, scale)
        self.faulty = not finite
        self.own_finite = math.isfinite(self.loss) and (bool(finite) or bool(self._own_finite))
        self.updates += 1
        self.guard.step_done()
        return self.loss

    def vector(self) -> NDArray[np.float32]:
        return np.concatenate([np.asarray(each.value).ravel() for each in self.model.trainable_variables])

    def set_vector(self, vector: NDArray[np.float32]) -> None:
        ends = np.cumsum([math.prod(each.shape) for each in self.model.trainable_variables])
        for variable, part in zip(self.model.trainable_variables, np.split(vector, ends[:-1]), strict=True):
            variable.assign(part.reshape(variable.shape))

    def mean_vector(self) -> NDArray[np.float32]:
        begin = time.perf_counter()
        with original_errors_raised():
            (mean,) = self._engine.allreduce([tf.constant(self.vector())], "hpctrain.parameters")
        self._averaging_seconds = time.perf_counter() - begin
        return np.array(mean)

    def undo_forward(self) -> None:
        for variable, value in self._before[1]:
            variable.assign(value)

    def average_statistics(self) -> None:
        average_statistics(self.model, self._comm)

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        loss_sum, correct = self._run(self._traced_evaluation, samples)
        return float(loss_sum), int(correct)

    def state(self) -> LazyState:
        variables = (self._shared() | self._own()).items()
        return LazyState(
            {GUARD_STEPS: np.array(self.guard.steps)} | (self.outer.state if self.outer else {}),
            {name: (_nbytes(variable), partial(_array, variable)) for name, variable in variables},
        )

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.before_update()
        self._before = NOTHING
        own, shared = self._own(), self._shared()
        outer = self.outer.state if self.outer else {}
        known = shared.keys() | own.keys() | outer.keys() | {GUARD_STEPS}
        odd = sorted(shared.keys() - state.keys() | state.keys() - known)
        # Earlier checkpoints have the states of generators.
        if odd := [name for name in odd if not name.startswith(RANDOM)]:
            raise ValueError(f"{odd[0]} is on one side only")
        for name, variable in (shared | own).items():
            if name in state:
                variable.assign(state[name])
        if self.outer:
            self.outer.restore(state)
        self.guard.steps = int(state[GUARD_STEPS])

    def _forward_state(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The state that a graph may change before its reduction fails: all but parameters and what depends on them.

        The sums of micro-batches are left out, since each step sets them to zero.
        """
        counters = [variable for variable in self._optimizer.variables if not variable.shape]
        variables = [*self.model.non_trainable_variables, *counters]
        return [(variable, tf.identity(variable.value)) for variable in variables]

    def _shared(self) -> dict[str, keras.Variable]:
        """The state that is equal on all ranks."""
        own = {id(variable) for variable in self._own().values()}
        # Several layers may give their variables the same path.
        variables = enumerate(self.model.variables)
        model = {f"model.{i}.{variable.path}": variable for i, variable in variables if id(variable) not in own}
        return model | ({} if self._moments == MOMENTS else self._optimizer_variables())

    def _own(self) -> dict[str, keras.Variable]:
        """This rank's own state: what layers compute from its samples, and a local optimizer's state."""
        layers = {f"{STATISTICS}{i}.{each.path}": each for i, each in enumerate(self.model.non_trainable_variables)}
        return layers | (self._optimizer_variables() if self._moments == MOMENTS else {})

    def _optimizer_variables(self) -> dict[str, keras.Variable]:
        return {f"{self._moments}{i}.{each.path}": each for i, each in enumerate(self._optimizer.variables)}

    def _run(self, traced: Callable[..., Any], samples: Samples, *further: tf.Tensor) -> Any:
        """Call a graph; all batches with images of one size and type share it."""
        images, labels = samples.images, samples.labels
        key = (traced, images.shape[1:], images.dtype, self.alone)
        if key not in self._graphs:
            own = (tf.TensorSpec((None, *images.shape[1:]), images.dtype), tf.TensorSpec((None,), labels.dtype))
            signature = (*own, *(tf.TensorSpec.from_tensor(each) for each in further))
            # Without autograph, which would take up to half a second: all branches are tf.cond already.
            self._graphs[key] = tf.function(traced, input_signature=signature, autograph=False)
        arguments = (tf.constant(images), tf.constant(labels), *further)
        return self._call(self._graphs[key], arguments, updates=traced == self._traced_step)

    def _call(self, graph: Callable[..., Any], arguments: tuple[Any, ...], *, updates: bool) -> Any:
        """Call a graph; ``updates`` says that it is a complete step with its update."""
        return graph(*arguments)

    def _accumulated(self, parts: Iterable[Samples], count: int, scale: float) -> tuple[float, tf.Tensor]:
        """A step whose gradients are added up part by part, in one graph for all of them."""
        if not self._sums:
            self._sums = [tf.Variable(tf.zeros_like(weights.value)) for weights in self.model.trainable_variables]
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        losses = []
        for number, part in enumerate(parts, start=1):
            begin_part(self.model, number, count)
            losses.append(self._run(self._traced_part, part, tf.constant(scale, tf.float32)))
        apply = (self._traced_application, self.alone)
        if apply not in self._graphs:
            self._graphs[apply] = tf.function(self._traced_application, autograph=False)
        applied = self._graphs[apply]()
        # A GPU is waited for once it has all of the step.
        return sum(map(float, losses)), applied

    def _traced_step(self, images: tf.Tensor, labels: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss, gradients = self._gradients(images, labels, scale)
        return loss, self._traced_update(gradients)

    def _traced_part(self, images: tf.Tensor, labels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        loss, gradients = self._gradients(images, labels, scale)
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.assign_add(gradient)
        return loss

    def _traced_application(self) -> tf.Tensor:
        return self._traced_update([tf.identity(total) for total in self._sums])

    def _traced_update(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Reduce the gradients, and update if they are finite, which it returns."""
        means = list(gradients) if self.alone else self._reduced(gradients)
        # Clipping would make NaN of finite gradients whose norm overflows.
        finite = tf.math.is_finite(tf.linalg.global_norm(means)) if self._clips else all_finite(means)

        def update() -> None:
            self._optimizer.apply(means, self.model.trainable_variables)

        def leave_out() -> None:
            # The loss does not show it, because TensorFlow's layers can lose NaNs on the way there.
            self._own_finite.assign(all_finite(gradients))

        tf.cond(finite, update, leave_out)
        return finite

    def _reduced(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The means of the gradients over the ranks."""
        with tf.control_dependencies(gradients):
            begin = tf.timestamp()
        means = self._engine.allreduce(list(gradients), "hpctrain.gradients", self._wire)
        with tf.control_dependencies(means):
            self._waited.assign(tf.timestamp() - begin)
            # TensorFlow orders a write after earlier reads: read now, the counter stays unchanged if a reduction fails.
            tf.convert_to_tensor(self._optimizer._iterations.value)
        return means

    def _gradients(self, images: tf.Tensor, labels: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The loss and its gradients."""
        with tf.GradientTape() as tape:
            logits = self.model(self._normalised(images), training=True)
            loss = scale * tf.reduce_sum(cross_entropies(logits, labels, self._smoothing))
        # A loss that is not finite has no gradient that may be used, although it can have a finite one.
        seed = tf.where(tf.math.is_finite(loss), tf.ones_like(loss), math.nan)
        return loss, tape.gradient(loss, self.model.trainable_variables, output_gradients=seed)

    def _traced_evaluation(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = self.model(self._normalised(images), training=False)
        correct = tf.math.count_nonzero(tf.argmax(logits, axis=1) == labels)
        return tf.reduce_sum(cross_entropies(logits, labels)), correct

    def _normalised(self, images: tf.Tensor) -> tf.Tensor:
        if images.dtype != tf.uint8:
            return images
        return (tf.cast(images, tf.float32) - self._mean) / self._deviation


def cross_entropies(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """The cross entropy of each sample, 0 for one without a label: float32, whatever the logits are computed in.

    Labels are smoothed as PyTorch does it: ``smoothing`` of a label is spread over all classes, its own included.
    """
    known = labels != NO_LABEL
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(known, labels, 0), logits)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * tf.reduce_mean(tf.nn.log_softmax(logits), axis=1)
    return tf.where(known, losses, 0.0)


def _nbytes(variable: keras.Variable) -> int:
    return int(tf.as_dtype(variable.dtype).size * math.prod(variable.shape))


def _array(variable: keras.Variable) -> NDArray[Any]:
    """A copy of the variable's value."""
    return np.asarray(variable.value)


def _build(recipe: Recipe, comm: Communicator) -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_POLICY[recipe.precision])
    try:
        model: keras.Model = models.build(recipe.model, "keras", comm, at_once=recipe.batch.at_once(comm.size))
        if recipe.model.init_from:
            drawn = state_of(model)
            arrays, words = begin_with(recipe.model, {name: array.shape for name, array in drawn.items()})
            load_state(model, drawn | arrays)
            comm.say(f"{recipe.model.name} {words}")
        return model
    finally:
        keras.config.set_dtype_policy(before)
