"""One rank's part of global batches, with its share of them, and the passes over datasets of such parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.recording import note_data_position, warn_of_data_restart
from hpctrain.worker.comm import Communicator


class Part(NamedTuple):
    """A part of a dataset of ``(x, y, sample_weight)``."""

    x: Any
    y: Any
    sample_weight: Any
    share: Any


class UnweightedPart(NamedTuple):
    """A part of a dataset of ``(x, y)``. Its weights are ones, and a ``train_step`` does not see them."""

    x: Any
    y: Any
    sample_weight: Any
    share: Any


class InputPart(NamedTuple):
    """A part of a dataset of inputs alone."""

    x: Any
    share: Any


_KINDS = (Part, UnweightedPart, InputPart)


def is_part(data: Any) -> bool:
    """Whether ``data`` is a part or the type of one."""
    return isinstance(data, _KINDS)


def batch_of(part: Any) -> Any:
    """The batch as the user's dataset held it: ``(x, y, sample_weight)``, ``(x, y)`` or ``x``."""
    if isinstance(part, InputPart):
        return part.x
    return tuple(part[:2]) if isinstance(part, UnweightedPart) else tuple(part[:3])


def is_sharded(data: Any) -> bool:
    """Whether ``data`` is a dataset of parts."""
    if not isinstance(data, tf.data.Dataset):
        return False
    spec = data.element_spec
    if not is_part(spec) and _holds_part(spec):
        raise HpctrainError(
            "HT-shard-divided-already",
            "the dataset yields {kind} with the parts of ht.shard inside",
            "call ht.shard last: ht.shard(tf.data.Dataset.zip(…))",
            kind=type(spec).__name__,
        )
    return is_part(spec)


def _holds_part(spec: Any) -> bool:
    if isinstance(spec, _KINDS):
        return True
    members = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple | list) else ()
    return any(_holds_part(member) for member in members)


class DatasetPasses:
    """The passes over a sharded dataset.

    Args:
        own: whether hpctrain makes the orders, as it does for arrays; otherwise the dataset's own shuffle does.
        next_epoch: the epoch whose order the first pass has.

    Attributes:
        next_epoch: the epoch whose order the next pass over arrays has.
        iterators: how many were made of the dataset, each of which has taken the seeds of an order.
    """

    def __init__(self, *, own: bool, next_epoch: int) -> None:
        self._own = own
        self.next_epoch = next_epoch
        self.iterators = 0
        self._begun = False

    def take(self) -> int:
        """The epoch whose order a pass over arrays has that begins now."""
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return epoch

    def begin_at(self, epoch: int, dataset: tf.data.Dataset, *, iterators: int = 1) -> None:
        """Skip the orders of earlier epochs, for each of which so many ``iterators`` would have been made.

        Only the first call skips any, because a script that continues has used them up.
        """
        if self._own:
            self.next_epoch = max(self.next_epoch, epoch)
        elif not self._begun:
            # Each iterator draws the seeds of its order when it is made, before it reads anything.
            for _ in range(epoch * iterators):
                iter(dataset)
        self._begun = True

    def catch_up(self, comm: Communicator, dataset: tf.data.Dataset) -> None:
        """Skip the orders that another rank has drawn by itself. Collective."""
        epoch, made = comm.allreduce(np.array([self.next_epoch, self.iterators]), "max").tolist()
        if self._own:
            self.next_epoch = epoch
        else:
            for _ in range(made - self.iterators):
                iter(dataset)


def register(dataset: tf.data.Dataset, passes: DatasetPasses) -> tf.data.Dataset:
    """Record the passes over a dataset that ``ht.shard`` returns."""
    dataset._hpctrain_passes = passes
    kind: Any = next(each for each in type(dataset).__mro__ if "__iter__" in vars(each))
    if not hasattr(kind.__iter__, "counts"):
        kind.__iter__ = _counting(kind.__iter__)
    return dataset


def is_registered(dataset: tf.data.Dataset) -> bool:
    """Whether this is what ``ht.shard`` returned, and not a dataset made of it."""
    return hasattr(dataset, "_hpctrain_passes")


def _counting(make: Any) -> Any:
    def counting(dataset: tf.data.Dataset) -> Any:
        if is_part(dataset.element_spec):
            for passes, _ in _registered(dataset):
                passes.iterators += 1
        return make(dataset)

    counting.counts = True  # type: ignore[attr-defined]
    return counting


class ContinueOrders(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives the first epoch of a ``fit`` the order of its number, however that number was restored."""

    def __init__(self, comm: Communicator, dataset: tf.data.Dataset) -> None:
        super().__init__()
        self._comm = comm
        self._found = list(_registered(dataset))
        # At the end of an epoch whose length is known, Keras makes an iterator that it does not use.
        self._iterators = 2 if int(dataset.cardinality()) > 0 else 1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        found, self._found = self._found, []
        for passes, dataset in found:
            passes.catch_up(self._comm, dataset)
            passes.begin_at(epoch, dataset, iterators=self._iterators)
        if found:
            note_data_position() if epoch else warn_of_data_restart(self._comm)


def _registered(dataset: Any) -> Iterator[tuple[DatasetPasses, tf.data.Dataset]]:
    """The recorded passes of a dataset, or of the datasets that it was made from."""
    if passes := getattr(dataset, "_hpctrain_passes", None):
        yield passes, dataset
    else:
        for source in dataset._inputs():
            yield from _registered(source)
