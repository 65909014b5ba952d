"""The state of a distributed model during training that its optimizers and callbacks share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_run import run

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.reduction import GradientReduction

_NUMBERS = itertools.count()

# The distributions whose steps are being traced or computed, the innermost last.
_computing: list[Distribution] = []


class Distribution:
    """The state of one distributed model. Its optimizers share it; a GAN has two.

    Attributes:
        optimizers: those that were distributed for this model.
        warned: whether a warning about data that ``ht.shard`` did not make was printed.
        reduction: averages its gradients.
        number: how many models were distributed before it, the same on all ranks.
    """

    reduction: GradientReduction

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._share: tf.Tensor | tf.Variable | None = None
        self._variable: tf.Variable | None = None
        self.optimizers: list[keras.optimizers.Optimizer] = []
        self.warned = False
        self.number = next(_NUMBERS)

    @property
    def share(self) -> tf.Tensor | None:
        """Within a step of ``fit``, samples of this rank's part x ranks / samples of the global batch.

        None in loops that weight their own loss.
        """
        return None if self._share is None else tf.convert_to_tensor(self._share)

    @contextmanager
    def computing(self, share: tf.Tensor) -> Iterator[None]:
        """A context manager in which gradients are those of a part with this share."""
        self._share = tf.cast(share, tf.float64)
        if tf.executing_eagerly():
            # A tf.function that the step calls keeps what it found when it was traced, with an earlier batch: in a
            # variable it finds this batch's number.
            if self._variable is None:
                self._variable = tf.Variable(self._share, trainable=False)
            self._variable.assign(self._share)
            self._share = self._variable
        _computing.append(self)
        try:
            yield
        finally:
            _computing.pop()
            self._share = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """A context manager within a step, in which losses and metrics are those of the samples that they get."""
        share, self._share = self._share, None
        try:
            yield
        finally:
            self._share = share


def in_whole_batch() -> bool:
    """Whether a step of ``fit`` is within what gets the samples of all ranks."""
    return bool(_computing) and _computing[-1].share is None


def share_in_work() -> tf.Tensor | None:
    """The share of the current part within a step of ``fit``, and None outside of one."""
    return _computing[-1].share if _computing else None


def distribution_of(model: keras.Model) -> Distribution | None:
    """The distribution that ``ht.distribute`` made for this model."""
    known: Distribution | None = getattr(model, "_distribution", None)
    return known


def register(model: keras.Model, distribution: Distribution) -> None:
    """Register ``model`` as distributed for as long as it lives, since its optimizers refer to it."""
    model._distribution = distribution
    run.models.add(model)


def distributed_models() -> list[keras.Model]:
    """All distributed models that are alive, in the order in which they were distributed."""
    return sorted(run.models, key=lambda model: model._distribution.number)
