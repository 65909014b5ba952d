"""The reduction of a Keras model's gradients over the ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution
from hpctrain.worker.adapters.keras.ranks import number_in_graph
from hpctrain.worker.adapters.keras.variables import BUILD_HINT, checksums, guard_of, is_built
from hpctrain.worker.comm.graph_errors import preserve_errors

# Optimizers are distributed in the same order on every rank, so a running number names their collectives alike.
_NUMBERS = itertools.count()


class GradientReduction:
    """Averages the gradients of one model over the ranks, and proves that the ranks stay equal.

    Attributes:
        wire: how gradients travel between nodes.
        synchronised: whether every rank has rank 0's variables.
        guarded: whether the callback of ``fit`` checks the parameters, and not this reduction.
        ahead: whether a trainer reduces the gradients by :meth:`mean`, and tapes give it those of its own samples.
        waited: seconds between the last gradient and the last mean of the last reduction.
    """

    def __init__(self, distribution: Distribution, model: keras.Model, wire: tf.DType | None, guard_every: int) -> None:
        comm = distribution.comm
        self.comm = comm
        self.synchronised = False
        self.wire = wire
        self.guarded = False
        self.ahead = False
        self._distribution = distribution
        self._codes: dict[tuple[int, ...], str] = {}
        self._engine = comm.tensorflow()
        self._model = model
        self._every = guard_every
        self._guard = guard_of(comm, model, every=guard_every) if is_built(model) else None
        self.waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._name = f"hpctrain.{next(_NUMBERS)}"

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

            return self.mean(weighted, name), backward

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

    def mean(self, gradients: Sequence[Any], name: str = "") -> list[tf.Tensor]:
        """The mean of each gradient over the ranks, dense."""
        dense = [tf.convert_to_tensor(each) for each in gradients]
        with tf.control_dependencies(dense):
            begin = tf.timestamp()
        reduced = self._engine.allreduce(dense, name or f"{self._name}.all", self.wire)
        with tf.control_dependencies(reduced):
            self.waited.assign(tf.timestamp() - begin)
            # TensorFlow orders a write after earlier reads: read now, the counters stay unchanged if a reduction fails.
            inner = [getattr(each, "inner_optimizer", each) for each in self._distribution.optimizers]
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
                "HT-optimizer-before-weights",
                "the first update comes before the ranks were given the same weights: the model was not "
                "built when ht.distribute saw it",
                f"{BUILD_HINT}. Or build it after that, and train it with fit",
            )
