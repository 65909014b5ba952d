"""Compares what the ranks give ``ht.shard``: arrays at once, a tf.data.Dataset without drawing from it.

To draw from a dataset would consume a user's generator, and move the order of a shuffle on. What it is made of is
compared: its steps with their seeds, and arrays in it. What a generator yields or a file contains is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.same_data import WHOLE, Sample, compare, look_at, places
from hpctrain.worker.comm import Communicator

_ALIKE = "build the same dataset, with the same settings, on every rank"
_SEEDED = "use dataset.shuffle(buffer, seed=0), or keras.utils.set_random_seed(0) on every rank before it is made"
# Settings of a dataset's steps, by the attributes in which TensorFlow keeps them.
_SETTINGS = ("batch_size", "buffer_size", "count", "num_shards", "index", "seed", "seed2", "start", "stop", "step")


def compare_arrays(comm: Communicator, arrays: tuple[Any, ...], **settings: Any) -> None:
    """Refuse arrays or settings that differ between ranks. Collective.

    Raises:
        HpctrainError: names what differs, with the values of two ranks; raised on all ranks.
    """
    if comm.size == 1:
        return
    facts = {"the number of samples": (str(len(tf.nest.flatten(arrays)[0])), WHOLE)}
    facts |= {name: (str(value), "give ht.shard the same settings on every rank") for name, value in settings.items()}
    compare(comm, facts, _rows(arrays))


def compare_datasets(comm: Communicator, dataset: tf.data.Dataset) -> None:
    """Refuse datasets that are made differently on the ranks, or shuffled without a seed. Collective.

    Raises:
        HpctrainError: names what differs, with the values of two ranks; raised on all ranks.
    """
    facts = {"what the dataset yields": (str(dataset.element_spec), _ALIKE)}
    looks: dict[Any, Sample] = {}
    unseeded = False
    for number, step in enumerate(reversed(list(_steps(dataset))), 1):
        kind = type(step).__name__.strip("_")
        facts[f"step {number} of the dataset"] = kind, _ALIKE
        own = {name: value for name in _SETTINGS if (value := _setting(step, name)) is not None}
        for name, value in own.items():
            hint = _SEEDED if "seed" in name else WHOLE if name == "index" else _ALIKE
            facts[f"{name} of step {number} of the dataset, {kind}"] = str(value), hint
        unseeded |= own.get("seed") == own.get("seed2") == 0 and own.get("buffer_size") != 1
        if kind == "TensorSliceDataset" and all(_has_rows(each) for each in step._tensors):
            arrays = tuple(step._tensors)
            looks |= {f"{place} of step {number} of the dataset": look for place, look in _rows(arrays).items()}
    facts["the number of batches"] = str(int(dataset.cardinality())), WHOLE
    compare(comm, facts, looks)
    # Found on all ranks alike, each of which would draw a seed of its own.
    if unseeded:
        raise HpctrainError("the dataset is shuffled without a seed: each rank would have an order of its own", _SEEDED)


def _steps(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset and those that it is made from."""
    yield dataset
    for each in (*dataset._inputs(), getattr(dataset, "_filenames", None)):
        if isinstance(each, tf.data.Dataset):
            yield from _steps(each)


def _setting(step: tf.data.Dataset, name: str) -> int | None:
    value = getattr(step, f"_{name}", None)
    number = np.asarray(value.numpy() if isinstance(value, tf.Tensor) else value)
    return int(number) if number.dtype.kind in "iu" and not number.shape else None


def _has_rows(tensor: tf.Tensor) -> bool:
    """Whether its rows can be looked at; ragged and sparse ones are packed."""
    return hasattr(tensor, "numpy") and tensor.dtype != tf.variant


def _rows(arrays: tuple[Any, ...]) -> dict[int, Sample]:
    """What samples of arrays look like, by their indices."""
    flat = tf.nest.flatten(arrays)
    return {
        place: look_at([row.numpy() if isinstance(row, tf.Tensor) else row for row in (each[place] for each in flat)])
        for place in places(int(flat[0].shape[0]))
    }
