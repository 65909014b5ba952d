"""The reduction of a Keras model's gradients over the ranks: what its tapes give and its optimizers apply."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution, distributed_models, distribution_of, share_in_work
from hpctrain.worker.adapters.keras.variables import BUILD_HINT, broadcast, checksums, guard_of, inner_of, is_built
from hpctrain.worker.adapters.keras.whole_batch import number_in_graph
from hpctrain.worker.comm.graph_errors import preserve_errors


class GradientReduction:
    """Averages the gradients of one model over the ranks for all its optimizers, and proves that the ranks stay equal.

    Attributes:
        wire: how gradients travel between nodes.
        synchronised: whether every rank has rank 0's variables.
        guarded: whether the callback of ``fit`` checks the parameters, and not this reduction.
    """

    def __init__(self, distribution: Distribution, model: keras.Model, guard_every: int) -> None:
        comm = distribution.comm
        self.comm = comm
        self.synchronised = False
        self.wire: tf.DType | None = None
        self.guarded = False
        self._distribution = distribution
        self._codes: dict[tuple[int, ...], str] = {}
        self._engine = comm.tensorflow()
        self._model = model
        self._every = guard_every
        self._guard = guard_of(comm, model, every=guard_every) if is_built(model) else None
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Models are distributed in the same order on every rank, so their numbers name their collectives alike.
        self._name = f"hpctrain.{distribution.number}"

    def of_tape(self, variables: Sequence[Any], gradients: Sequence[Any], share: tf.Tensor | None) -> list[Any]:
        """The mean over the ranks of each gradient times its rank's share, which can be differentiated again.

        The rows of an embedding's gradient stay rows, those of all ranks one after the other as in one process: Keras
        clips and squares each occurrence by itself. They become dense where another tape may differentiate them, and
        on GPUs, where adding up repeated rows in parallel has no fixed order and ranks would drift apart by rounding.
        """
        self._check_ready()
        weighted = [g if share is None else tf.math.scalar_mul(tf.cast(share, g.dtype), g) for g in gradients]
        dense = could_possibly_record() or bool(tf.config.get_visible_devices("GPU"))
        as_rows = [isinstance(each, tf.IndexedSlices) and not dense for each in weighted]
        name = f"{self._name}.{self._code(variables)}.{number_in_graph()}"
        rows = iter([self._rows(each, f"{name}.{place}") for place, each in enumerate(weighted) if as_rows[place]])
        given = [tf.convert_to_tensor(each) for each, is_rows in zip(gradients, as_rows, strict=True) if not is_rows]
        means = iter(self._differentiable(given, share, name) if given else [])
        return [next(rows) if is_rows else next(means) for is_rows in as_rows]

    def _differentiable(self, gradients: list[tf.Tensor], share: tf.Tensor | None, name: str) -> list[tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def mean(*own: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            weighted = [each if share is None else each * tf.cast(share, each.dtype) for each in own]

            def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
                # What one rank makes of the mean reaches the gradients of all.
                return self._differentiable(list(upstream), share, f"{name}.again{number_in_graph()}")

            return self._mean(weighted, name), backward

        found = mean(*gradients)
        return list(found) if isinstance(found, list | tuple) else [found]

    def _code(self, variables: Iterable[Any]) -> str:
        """A word for these variables, in this order, that is the same on all ranks."""
        key = tuple(map(id, variables))
        if key not in self._codes:
            every = self._model.variables
            places = {id(each): place for place, variable in enumerate(every) for each in (variable, variable.value)}
            self._codes[key] = f"{zlib.crc32(repr([places[each] for each in key]).encode()):x}"
        return self._codes[key]

    def _mean(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        reduced = self._engine.allreduce(gradients, name, self.wire)
        with tf.control_dependencies(reduced):
            # TensorFlow orders a write after earlier reads: read now, the counters stay unchanged if a reduction fails.
            inner = map(inner_of, self._distribution.optimizers)
            for counter in (self._updates, *(each._iterations.value for each in inner)):
                tf.convert_to_tensor(counter)
        return reduced

    def _rows(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        values = slices.values / self.comm.size
        return tf.IndexedSlices(
            self._engine.allgather(values, f"{name}.values"),
            self._engine.allgather(slices.indices, f"{name}.indices"),
            slices.dense_shape,
        )

    def updated(self) -> None:
        """Count an update in the guard, in a hand-written loop, eagerly or inside a tf.function."""
        if self.guarded or self.comm.size == 1:
            return
        if self._guard is None:
            self._guard = guard_of(self.comm, self._model, every=self._every)
        if tf.executing_eagerly():
            self._guard.step_done()
            return
        count = self._updates.assign_add(1)
        tf.cond(
            (count == 1) | (count % self._every == 0),
            lambda: tf.py_function(
                preserve_errors(self._compare), [count, checksums(self._model.trainable_variables)], tf.bool
            ),
            lambda: tf.constant(True),
        )

    def _compare(self, count: tf.Tensor, sums: tf.Tensor) -> bool:
        assert self._guard is not None
        self._guard.compare(int(count), np.asarray(sums.numpy(), dtype=np.int64))
        return True

    def _check_ready(self) -> None:
        if self.comm.size == 1:
            return
        if not self.synchronised:
            raise HpctrainError(
                "HT-model-not-built",
                "the first update comes before the ranks were given the same weights: the model was not "
                "built when ht.distribute saw it",
                f"{BUILD_HINT}. Or build it after that, and train it with fit",
            )


class Distributed:
    """Updates from dense gradients, which the guard counts."""

    _reduction: GradientReduction

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, _in_order(value))  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, _in_order(value))  # type: ignore[misc]

    def _backend_update_step(self, *args: Any) -> None:
        super()._backend_update_step(*args)  # type: ignore[misc]
        self._reduction.updated()


def _in_order(value: Any) -> Any:
    """A dense gradient: repeated rows are added to a variable in no fixed order, and ranks would drift by rounding."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


def reduction_of(optimizer: keras.optimizers.Optimizer) -> GradientReduction | None:
    """The reduction that ``distribute`` gave this optimizer, or the one that it wraps."""
    inner = inner_of(optimizer)
    return inner._reduction if isinstance(inner, Distributed) else None


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers whose gradients are reduced. The wrapper that ``compile`` puts around one takes its place."""
    distribution = distribution_of(model)
    known = distribution.optimizers if distribution else []
    return [model.optimizer if inner_of(each) is inner_of(model.optimizer) else each for each in known]


def synchronise(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Broadcast model and optimizer from rank 0; optimizers may update after that."""
    reduction = model._distribution.reduction
    broadcast(reduction.comm, model, optimizer)
    reduction.synchronised = True


def make_distributed(optimizer: keras.optimizers.Optimizer, reduction: GradientReduction) -> None:
    """Change the class of this instance in place, so that its state and all references to it stay valid."""
    own = type(optimizer)
    # Keras saves an object under what its __class__ says, and looks up registered names by it.
    members = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__class__": property(lambda _: own)}
    optimizer.__class__ = type(own.__name__, (Distributed, own), members)
    optimizer._reduction = reduction


class _Tapes:
    """Whether a tape calls its own ``gradient`` for a Jacobian, and whether a script was warned of other models."""

    within_jacobian = warned = False


_tapes = _Tapes()


def watch_tapes() -> None:
    """From now on, tapes give the gradients of whole batches for the variables of distributed models.

    They are reduced where they are made and not where they are applied: what a script computes from them is then plain
    arithmetic, the same on every rank.
    """
    tape = tf.GradientTape
    if hasattr(tape.gradient, "watches"):
        return
    tape.gradient = _of_whole_batches(tape.gradient)
    tape.jacobian = _of_own_samples(tape.jacobian)


def _of_whole_batches(gradient: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def watched(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *further: Any, **named: Any) -> Any:
        found = gradient(tape, target, sources, output_gradients, *further, **named)
        if _tapes.within_jacobian:
            return found
        variables, gradients = tf.nest.flatten(sources), tf.nest.flatten(found)
        for distribution, places in _by_model(variables):
            if output_gradients is None:
                _check_one_number(target)
            _reduce(distribution, variables, gradients, places)
        return tf.nest.pack_sequence_as(sources, gradients)

    watched.watches = True
    return watched


def _of_own_samples(jacobian: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def watched(*arguments: Any, **settings: Any) -> Any:
        _tapes.within_jacobian = True
        try:
            return jacobian(*arguments, **settings)
        finally:
            _tapes.within_jacobian = False

    return watched


def _by_model(variables: Sequence[Any]) -> Iterator[tuple[Distribution, list[int]]]:
    """The distributed models that variables are part of, each with the places of its own, in one order on all ranks."""
    left: dict[int, list[int]] = {}
    for place, variable in enumerate(variables):
        left.setdefault(id(variable), []).append(place)
    for model in distributed_models():
        distribution = distribution_of(model)
        # A model that ht.distribute refused halfway has no optimizer.
        if distribution is None or distribution.comm.size == 1 or not distribution.optimizers:
            continue
        own = [each for variable in model.trainable_variables for each in (variable, variable._value)]
        places = sorted(place for each in own for place in left.pop(id(each), ()))
        if places:
            yield distribution, places
    _warn_of_others([variables[place] for place, *_ in left.values()])


def _reduce(distribution: Distribution, variables: Sequence[Any], gradients: list[Any], places: list[int]) -> None:
    """Replace the gradients in these places by their means over the ranks, each weighted by its rank's share."""
    share = share_in_work()
    present = [place for place in places if gradients[place] is not None]
    means = distribution.reduction.of_tape(
        [variables[place] for place in present], [gradients[place] for place in present], share
    )
    for place, mean in zip(present, means, strict=True):
        gradients[place] = mean


def _check_one_number(target: Any) -> None:
    """Refuse a loss with a value for each sample, which a tape adds up.

    The mean over the ranks of the sums of their samples is not the sum over those of all ranks, and no mean either.
    """
    if any(map(_is_long, tf.nest.flatten(target))):
        raise HpctrainError(
            "HT-not-one-number",
            "tape.gradient was given a loss of several numbers, and differentiates their sum",
            "give it tf.reduce_mean(loss), or for the sum over the samples of all ranks "
            "ht.sum_loss(tf.reduce_sum(loss)); or tf.reduce_sum(loss) where each number is a mean over samples",
        )


def _is_long(target: Any) -> bool:
    shape = getattr(target, "shape", None)
    return bool(isinstance(shape, tf.TensorShape) and shape.rank and shape.num_elements() != 1)


def _warn_of_others(variables: Sequence[Any]) -> None:
    """Say once that a Keras model is trained which no rank shares with the others.

    Variables of a strategy of tf.distribute are shared by its replicas, which it sees to itself.
    """
    if tf.distribute.has_strategy():
        return
    models = distributed_models()
    for variable in variables:
        if not _tapes.warned and isinstance(variable, keras.Variable) and variable.trainable:
            _tapes.warned = True
            distribution = distribution_of(models[0]) if models else None
            if distribution is not None:
                distribution.comm.say(
                    f"tape.gradient is asked for {variable.path!r}, which is not part of a model that was given to "
                    "ht.distribute: each rank gets the gradient of its own samples"
                )
