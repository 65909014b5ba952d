"""Which epoch's order a sharded dataset yields next: that of the epoch with which ``fit`` begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.adapters.keras.rank_batch import is_part
from hpctrain.worker.adapters.recording import note_data_position, warn_of_data_restart
from hpctrain.worker.comm import Communicator


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
