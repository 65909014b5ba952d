"""Each rank's part of global batches, as a tf.data.Dataset that tells what each part weighs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.comm import Communicator, current
from hpctrain.data.sampling import batch_count, epoch_order, global_batches, share
from hpctrain.errors import HpctrainError


def shard(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    comm: Communicator | None = None,
) -> tf.data.Dataset:
    """This rank's part of every global batch of ``data``, with its share.

    The mean over the ranks of share x mean loss is the mean loss over the global batch, whatever its size: the share
    is own samples x ranks / samples of the batch. A rank without a sample of a batch computes another rank's with
    share 0, so every rank has the same number of batches. ``fit`` and ``evaluate`` of a distributed model take the
    dataset as it is; a loop of your own multiplies its mean loss by the share::

        for x, y, sample_weight, share in ht.shard(dataset):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True), sample_weight=sample_weight) * share

    Args:
        data: a tf.data.Dataset whose elements are global batches ``(x, y)`` or ``(x, y, sample_weight)``, the same
            on every rank (give its ``shuffle`` a seed); or a tuple of such arrays.
        batch_size: samples of a global batch; for arrays only.
        shuffle: for arrays only, by default true: a new order an epoch, from the seed and the epoch alone. An epoch
            is one pass over the returned dataset.
        seed: of the order.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Returns:
        A dataset of ``(x, y, sample_weight, share)``: weights as given, or ones, and a scalar.

    Raises:
        HpctrainError: data of another form, or settings that do not belong to it.
    """
    comm = comm or current()
    if isinstance(data, tf.data.Dataset):
        if batch_size is not None or shuffle is not None:
            raise HpctrainError(
                "batch_size and shuffle belong to arrays, and this is a tf.data.Dataset",
                "use dataset.shuffle(buffer, seed=…).batch(GLOBAL_BATCH) before ht.shard",
            )
        return _shard_dataset(data, comm)
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        raise HpctrainError(
            f"{type(data).__name__} cannot be sharded", "give a tf.data.Dataset or a tuple (x, y[, sample_weight])"
        )
    if batch_size is None or batch_size < 1:
        raise HpctrainError(f"batch_size={batch_size}: arrays need the number of samples of a global batch")
    return _shard_arrays(data, comm, batch_size=batch_size, shuffle=shuffle is not False, seed=seed)


def _shard_dataset(dataset: tf.data.Dataset, comm: Communicator) -> tf.data.Dataset:
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise HpctrainError(f"the dataset yields {spec}", "it must yield batches (x, y) or (x, y, sample_weight)")
    if any(part.shape.rank == 0 for part in tf.nest.flatten(spec)):
        raise HpctrainError("the dataset yields single samples", "use dataset.batch(GLOBAL_BATCH) before ht.shard")

    def part(*batch: Any) -> tuple[Any, Any, tf.Tensor, tf.Tensor]:
        samples = tf.shape(tf.nest.flatten(batch)[0])[0]
        base, longer = samples // comm.size, samples % comm.size
        start = comm.rank * base + tf.minimum(comm.rank, longer)
        count = base + tf.cast(comm.rank < longer, tf.int32)
        # A rank without a sample takes the first, as hpctrain.data.sampling.share does.
        start, rows = tf.where(count > 0, start, 0), tf.maximum(count, 1)
        x, y, *given = tf.nest.map_structure(lambda tensor: tensor[start : start + rows], batch)
        floatx = keras.config.floatx()
        weight = tf.cast(given[0], floatx) if given else tf.ones([rows], floatx)
        return x, y, weight, tf.cast(count * comm.size / samples, floatx)

    return dataset.map(part, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _shard_arrays(
    arrays: tuple[Any, ...], comm: Communicator, *, batch_size: int, shuffle: bool, seed: int
) -> tf.data.Dataset:
    arrays = tf.nest.map_structure(np.asarray, arrays)
    lengths = {len(array) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise HpctrainError(f"the arrays have different numbers of samples: {sorted(lengths)}")
    samples = lengths.pop()
    epochs = itertools.count()
    floatx = keras.config.floatx()

    def parts() -> Iterator[tuple[Any, Any, Any, float]]:
        epoch = next(epochs)
        order = epoch_order(samples, seed=seed, epoch=epoch) if shuffle else np.arange(samples)
        for batch in global_batches(order, batch_size, drop_last=False):
            own = share(batch, comm.rank, comm.size)
            x, y, *given = tf.nest.map_structure(lambda array, rows=own.indices: array[rows], arrays)
            weight = given[0] if given else np.ones(len(own.indices))
            yield x, y, weight.astype(floatx), own.weight

    *inputs, _ = arrays if len(arrays) == 3 else (*arrays, None)
    x, y = (tf.nest.map_structure(_batch_spec, part) for part in inputs)
    weights = tf.TensorSpec((None, *(arrays[2].shape[1:] if len(arrays) == 3 else ())), floatx)
    share_spec = tf.TensorSpec((), floatx)
    batches = batch_count(samples, batch_size, drop_last=False)
    # Keras would draw a PyDataset's batches in an order of its own, another on each rank; a tf.data.Dataset it leaves.
    return tf.data.Dataset.from_generator(parts, output_signature=(x, y, weights, share_spec)).apply(
        tf.data.experimental.assert_cardinality(batches)
    )


def _batch_spec(array: np.ndarray[Any, Any]) -> tf.TensorSpec:
    return tf.TensorSpec((None, *array.shape[1:]), array.dtype)
