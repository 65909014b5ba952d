"""Each rank's part of global batches as a tf.data.Dataset, with the weight of each part.

The ranks first compare what they gave ``ht.shard``: arrays at once, a tf.data.Dataset without drawing from it. Drawing
would consume a user's generator, and move the order of a shuffle on. What a dataset is made of is compared: its steps
with their seeds, and arrays in it. What a generator yields or a file contains is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.rank_batch import (
    DatasetPasses,
    InputPart,
    Part,
    UnweightedPart,
    is_sharded,
    register,
)
from hpctrain.worker.adapters.same_data import WHOLE, Sample, compare, sample_indices, summarise
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.data.sampling import batch_count, epoch_order, global_batches, share

_ALIKE = "build the same dataset, with the same settings, on every rank"
_SEEDED = "use dataset.shuffle(buffer, seed=0), or keras.utils.set_random_seed(0) on every rank before it is made"
# Settings of a dataset's steps, by the attributes in which TensorFlow keeps them.
_SETTINGS = ("batch_size", "buffer_size", "count", "num_shards", "index", "seed", "seed2", "start", "stop", "step")


def shard(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    epoch: int = 0,
    comm: Communicator | None = None,
) -> tf.data.Dataset:
    """This rank's part of every global batch of ``data``, with its share. Collective.

    The mean over the ranks of share x mean loss is the mean loss over the global batch, whatever its size: the share
    is own samples x ranks / samples of the batch. A rank without a sample of a batch computes another rank's with
    share 0, so every rank has the same number of batches. The share is part of the element, so it stays with its
    samples whatever is done with the dataset: ``take``, ``repeat``, ``prefetch``, a list of it.

    The ranks compare what they were given: of arrays the lengths, the settings and up to 64 samples; of a dataset its
    steps with their settings and seeds, and samples of arrays in it. What a generator yields or a file contains is not
    compared.

    ``fit`` and ``evaluate`` of a distributed model take the dataset as it is, and your own ``train_step`` gets the
    elements of ``data``. Without ``fit`` you get the share, and have to multiply the mean loss by it yourself::

        for x, y, sample_weight, share in ht.shard(dataset):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True), sample_weight=sample_weight) * share

    Args:
        data: a tf.data.Dataset whose elements are global batches ``(x, y)``, ``(x, y, sample_weight)`` or ``x``, the
            same on every rank (give its ``shuffle`` a seed); or a tuple of such arrays, or one array.
        batch_size: samples of a global batch; for arrays only.
        shuffle: for arrays only, true by default: a new order each epoch, which depends only on the seed and the epoch.
            An epoch is one pass over the returned dataset.
        seed: determines the order of arrays, together with the epoch.
        epoch: the epoch whose order the first pass has, in a loop of your own that was resumed. The order of a
            tf.data.Dataset is that of its own ``shuffle``, if that has a seed. ``fit`` has ``initial_epoch`` instead.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Returns:
        A dataset of ``(x, y, sample_weight, share)``: weights as given, or ones, and a scalar. For ``x`` alone:
        ``(x, share)``. Weights of a part with share 0 are 0. ``dataset.map`` sees one named tuple.

    Raises:
        HpctrainError: data of another form, or settings that do not belong to it; ranks that were given different data;
            a dataset that is shuffled without a seed.
    """
    comm = comm or current()
    if isinstance(data, tf.data.Dataset):
        if batch_size is not None or shuffle is not None:
            raise HpctrainError(
                "HT-shard-wrong-data",
                "batch_size and shuffle belong to arrays, and this is a tf.data.Dataset",
                "use dataset.shuffle(buffer, seed=…).batch(GLOBAL_BATCH) before ht.shard",
            )
        sharded = _shard_dataset(data, comm)
        passes = DatasetPasses(own=False, next_epoch=epoch)
        if epoch:
            passes.begin_at(epoch, sharded)
        return register(sharded, passes)
    if isinstance(data, np.ndarray | tf.Tensor):
        data = (data,)
    if not isinstance(data, tuple) or len(data) not in (1, 2, 3):
        raise HpctrainError(
            "HT-shard-wrong-data",
            "{kind} cannot be sharded",
            "give a tf.data.Dataset, a tuple (x, y[, sample_weight]) or an array x",
            kind=type(data).__name__,
        )
    if batch_size is None or batch_size < 1:
        raise HpctrainError(
            "HT-shard-wrong-data",
            "batch_size={batch_size}: arrays need the number of samples of a global batch",
            batch_size=batch_size,
        )
    passes = DatasetPasses(own=True, next_epoch=epoch)
    sharded = _shard_arrays(data, comm, passes, batch_size=batch_size, shuffle=shuffle is not False, seed=seed)
    return register(sharded, passes)


def _shard_dataset(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    spec = dataset.element_spec
    if is_sharded(dataset):
        raise HpctrainError("HT-shard-divided-already", "this dataset is already sharded", "call ht.shard once")
    if isinstance(spec, tuple) and len(spec) > 3:
        raise HpctrainError(
            "HT-shard-wrong-data",
            "the dataset yields {count} values",
            "it must yield batches (x, y), (x, y, sample_weight) or x",
            count=len(spec),
        )
    if any(part.shape.rank == 0 for part in tf.nest.flatten(spec)):
        raise HpctrainError(
            "HT-shard-wrong-data",
            "the dataset yields single samples",
            "use dataset.batch(GLOBAL_BATCH) before ht.shard",
        )
    if comm.size > 1:
        compare_datasets(comm, dataset)

    def part(*batch: Any) -> Part | UnweightedPart | InputPart:
        samples = tf.shape(tf.nest.flatten(batch)[0])[0]
        base, longer = samples // comm.size, samples % comm.size
        start = comm.rank * base + tf.minimum(comm.rank, longer)
        count = base + tf.cast(comm.rank < longer, tf.int32)
        # A rank without a sample takes the first, as hpctrain.worker.data.sampling.share does.
        start, rows = tf.where(count > 0, start, 0), tf.maximum(count, 1)
        own = tf.nest.map_structure(lambda tensor: tensor[start : start + rows], batch)
        return _part(own, rows, tf.cast(count * comm.size / samples, keras.config.floatx()))

    return dataset.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _shard_arrays(
    arrays: tuple[Any, ...], comm: Communicator, passes: DatasetPasses, *, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset:
    arrays = tf.nest.map_structure(np.asarray, arrays)
    lengths = {len(array) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise HpctrainError(
            "HT-shard-wrong-data", "the arrays have different numbers of samples: {lengths}", lengths=sorted(lengths)
        )
    samples = lengths.pop()
    if comm.size > 1:
        alike = "give ht.shard the same settings on every rank"
        settings = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        facts = {name: (str(value), alike) for name, value in settings.items()}
        compare(comm, {"the number of samples": (str(samples), WHOLE), **facts}, _sampled_rows(arrays))

    def parts() -> Iterator[tuple[Any, float]]:
        epoch = passes.take()
        order = epoch_order(samples, seed=seed, epoch=epoch) if shuffle else np.arange(samples)
        for batch in global_batches(order, batch_size, drop_last=False):
            own = share(batch, comm.rank, comm.size)
            yield tf.nest.map_structure(lambda array, rows=own.indices: array[rows], arrays), own.weight

    def part(own: tuple[Any, ...], share: tf.Tensor) -> Part | UnweightedPart | InputPart:
        return _part(own, tf.shape(tf.nest.flatten(own)[0])[0], share)

    specs = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), arrays)
    signature = (specs, tf.TensorSpec((), keras.config.floatx()))
    batches = batch_count(samples, batch_size, drop_last=False)
    # A tf.data.Dataset, because Keras would shuffle the batches of a PyDataset differently on each rank.
    drawn = tf.data.Dataset.from_generator(parts, output_signature=signature)
    return drawn.map(part).apply(tf.data.experimental.assert_cardinality(batches))


def _part(own: tuple[Any, ...], rows: tf.Tensor, share: tf.Tensor) -> Part | UnweightedPart | InputPart:
    """The form in which ``own`` samples are handed out: (x,), (x, y) or (x, y, sample_weight)."""
    floatx = keras.config.floatx()
    if len(own) == 1:
        return InputPart(own[0], share)

    def marked(weight: tf.Tensor) -> tf.Tensor:
        return tf.where(share > 0, tf.cast(weight, floatx), 0.0)

    x, y, *given = own
    if not given:
        return UnweightedPart(x, y, marked(tf.ones([rows], floatx)), share)
    return Part(x, y, tf.nest.map_structure(marked, given[0]), share)


def compare_datasets(comm: Communicator, dataset: tf.data.Dataset) -> None:
    """Refuse datasets that are made differently on the ranks, or shuffled without a seed. Collective."""
    facts = {"what the dataset yields": (str(dataset.element_spec), _ALIKE)}
    summaries: dict[Any, Sample] = {}
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
            summaries |= {
                f"{place} of step {number} of the dataset": summary for place, summary in _sampled_rows(arrays).items()
            }
    facts["the number of batches"] = str(int(dataset.cardinality())), WHOLE
    compare(comm, facts, summaries)
    # Raised after the comparison, so that all ranks raise it.
    if unseeded:
        raise HpctrainError(
            "HT-shard-wrong-data",
            "the dataset is shuffled without a seed: each rank would have an order of its own",
            _SEEDED,
        )


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
    """Whether the tensor's rows can be read: ragged and sparse tensors are packed as variants."""
    return hasattr(tensor, "numpy") and tensor.dtype != tf.variant


def _sampled_rows(arrays: tuple[Any, ...]) -> dict[int, Sample]:
    """Summaries of samples of arrays, by their indices."""
    flat = tf.nest.flatten(arrays)
    return {
        place: summarise([row.numpy() if isinstance(row, tf.Tensor) else row for row in (each[place] for each in flat)])
        for place in sample_indices(int(flat[0].shape[0]))
    }
