"""The reduction of one Keras optimizer's gradients over the ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution
from hpctrain.worker.adapters.keras.gradients import check_added_up
from hpctrain.worker.adapters.keras.share import check_used
from hpctrain.worker.adapters.keras.variables import BUILD_HINT, checksums, guard_of, is_built
from hpctrain.worker.adapters.keras.watch import check_compiler, check_fitted, check_updated
from hpctrain.worker.comm.base import Wire
from hpctrain.worker.comm.graph_errors import preserve_errors

# Optimizers are distributed in the same order on every rank, so a running number names their collectives alike.
_NUMBERS = itertools.count()


class GradientReduction:
    """Averages the gradients of one optimizer over the ranks, and proves that the ranks stay equal.

    Attributes:
        wire: how gradients travel between nodes.
        synchronised: whether every rank has rank 0's variables.
        scaled_alike: whether the ranks agree on skipping a step of loss scaling, or the loss is not scaled.
        guarded: whether the callback of ``fit`` checks the parameters, and not this reduction.
        ahead: whether the optimizer gets gradients that :meth:`mean` has reduced before.
        waited: seconds between the last gradient and the last mean of the last update.
    """

    def __init__(
        self,
        distribution: Distribution,
        model: keras.Model,
        wire: Wire[tf.DType],
        guard_every: int,
        *,
        adds_rows: bool,
    ) -> None:
        comm = distribution.comm
        self.comm = comm
        self.synchronised = False
        self.wire = wire
        self.scaled_alike = True
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
        self._present = "all"
        # Adding up repeated rows in parallel has no fixed order on a GPU, and ranks would drift apart by rounding.
        self._adds_rows = adds_rows or bool(tf.config.get_visible_devices("GPU"))

    def check_update(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Refuse, before it is made, an update that would differ between ranks.

        Args:
            gradients: one for each variable, or None. The ranks compare which have one before they reduce.
        """
        if self.comm.size == 1:
            return
        if self._distribution.share is None and not self.ahead:
            check_used()
        check_fitted(self._model)
        check_compiler()
        check_added_up(gradients)
        present = [gradient is not None for gradient in gradients]
        key = (*map(id, variables), *present)
        if key not in self._codes:
            check_updated(self._model, variables)
            self._codes[key] = self._code(itertools.compress(variables, present))
        self._present = self._codes[key]

    def _code(self, variables: Iterable[Any]) -> str:
        """A word for these variables, in this order, that is the same on all ranks."""
        every = self._model.variables
        places = {id(each): place for place, variable in enumerate(every) for each in (variable, variable.value)}
        return f"{zlib.crc32(repr([places[id(variable)] for variable in variables]).encode()):x}"

    def weighted(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients times this rank's share of the global batch; None for a variable without a gradient.

        Those of a tape have it already, and in loops that weight their own loss it is None.
        """
        share = self._distribution.share
        if share is None or self._distribution.weighted:
            return list(gradients)
        return [g if g is None else tf.math.scalar_mul(tf.cast(share, g.dtype), g) for g in gradients]

    def mean(self, gradients: Sequence[Any], counters: Sequence[tf.Variable] = ()) -> list[Any]:
        """The mean of each gradient over the ranks. The optimizer's counters must not change before it is there.

        The rows of an embedding's gradient stay rows, those of all ranks one after the other as in one process: Keras
        clips and squares each occurrence by itself. Where that comes to the same, and on GPUs, they are added up.
        """
        self._check_ready()
        return self._joined(gradients, f"{self._name}.{self._present}", self.wire, self._adds_rows, counters)

    def mean_by_hand(self, gradients: Sequence[Any], use: str) -> list[Any]:
        """What :meth:`mean` will make of these gradients, for a script that looks at it before the update."""
        self._check_ready()
        return self._joined(gradients, f"{self._name}.{use}", None, False)

    def _joined(
        self,
        gradients: Sequence[Any],
        name: str,
        wire: Wire[tf.DType],
        adds_rows: bool,
        counters: Sequence[tf.Variable] = (),
    ) -> list[Any]:
        as_rows = [isinstance(gradient, tf.IndexedSlices) and not adds_rows for gradient in gradients]
        dense = [tf.convert_to_tensor(each) for each, rows in zip(gradients, as_rows, strict=True) if not rows]
        slices = [each for each, rows in zip(gradients, as_rows, strict=True) if rows]
        own = dense + [part for each in slices for part in (each.values, each.indices)]
        with tf.control_dependencies(own):
            begin = tf.timestamp()
        joined = [self._rows(each, f"{name}.{number}") for number, each in enumerate(slices)]
        reduced = self._engine.allreduce(dense, name, wire) if dense else []
        with tf.control_dependencies(reduced + [part for each in joined for part in (each.values, each.indices)]):
            self.waited.assign(tf.timestamp() - begin)
            # TensorFlow orders a write after earlier reads: read now, the counters stay unchanged if a reduction fails.
            for counter in (self._updates, *counters):
                tf.convert_to_tensor(counter)
        sources = {True: iter(joined), False: iter(reduced)}
        return [next(sources[rows]) for rows in as_rows]

    def _rows(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        values = slices.values / self.comm.size
        return tf.IndexedSlices(
            self._engine.allgather(values, f"{name}.values"),
            self._engine.allgather(slices.indices, f"{name}.indices"),
            slices.dense_shape,
        )

    def all_finite(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether the gradients of every rank are finite, so that a step of loss scaling is skipped by all ranks or
        none.
        """
        if self.ahead:
            return finite
        return tf.cast(self._engine.minimum(tf.cast(finite, tf.int32), f"{self._name}.finite"), tf.bool)

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
        if not self.scaled_alike:
            raise HpctrainError(
                "HT-loss-scale-not-agreed",
                "mixed_float16 scales the loss, and the ranks did not agree on skipping a step that overflows",
                "give ht.distribute a keras.optimizers.LossScaleOptimizer(optimizer), or train with fit",
            )
