"""What several ranks refuse, and what they do together though a script does it on each: functions that assert."""

from __future__ import annotations

import functools
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras_small import LOSS, network, refused, samples, update

import hpctrain as ht


def any_optimizer_updates_all_ranks_alike(comm) -> None:
    x, y, _ = samples(8, comm.rank)
    model, optimizer = ht.distribute(network(), keras.optimizers.Adam(0.1))
    model.compile(optimizer, LOSS)
    model.compile(keras.optimizers.Adam(0.1), LOSS)
    model.fit(x, y, verbose=0)
    model.train_on_batch(x, y)
    for step in (update, tf.function(update)):
        step(model, keras.optimizers.SGD(0.1), x, y)
    weights = np.concatenate([each.ravel() for each in model.get_weights()])
    assert len({each.tobytes() for each in comm.allgather_object(weights)}) == 1


def ranks_stop_together(comm) -> None:
    """By a NaN in one rank's part of the second batch, and by what one rank's callback wants after an epoch."""

    class Asks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = comm.rank == 1

    batches = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    for value, callback in ((np.nan, keras.callbacks.TerminateOnNaN()), (0, Asks())):
        x, y, _ = samples(12, 0)
        x[5] = value
        model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
        model.compile(optimizer, LOSS)
        data = ht.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(3))
        model.fit(data, epochs=2, verbose=0, callbacks=[callback, note])
    assert batches == [0, 1, 0, 1, 2, 3], batches


def files_are_written_by_one_rank(comm, folder: Path) -> None:
    folder = comm.broadcast_object(folder) / "together"
    x, y, _ = samples(12, 1)
    epochs_seen = []

    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs_seen.append(epoch)
            if epochs_seen == [0, 1]:
                raise KeyboardInterrupt

    model, optimizer = ht.distribute(network(), keras.optimizers.Adam(0.1))
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    for _ in range(2):
        callbacks = [
            keras.callbacks.ModelCheckpoint(folder / "model.keras"),
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.CSVLogger(str(folder.parent / "log.csv")),
            Stops(),
        ]
        data = ht.shard((x, y), batch_size=5)
        try:
            model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            model.set_weights([weight + comm.rank for weight in model.get_weights()])
    comm.barrier()
    assert epochs_seen == [0, 1, 1, 2], epochs_seen
    assert [each.name for each in folder.iterdir()] == ["model.keras"]
    saved = keras.models.load_model(folder / "model.keras", safe_mode=True)
    for ours, theirs in zip(model.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def batch_norms_are_equal_when_they_are_saved_or_evaluated(comm) -> None:
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1, activation="sigmoid")]
    model, optimizer = ht.distribute(keras.Sequential(layers), keras.optimizers.SGD(0.1))
    model.compile(optimizer, LOSS)
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    x, y, _ = samples(20, comm.rank)
    model.fit(x, y, verbose=0, callbacks=[note], validation_data=(x, y))
    weights = np.concatenate([each.ravel() for each in seen[0]])
    assert len({each.tobytes() for each in comm.allgather_object(weights)}) == 1
    assert all((each != start).any() for each, start in zip(seen[0][2:4], (0, 1), strict=True))


def the_best_weights_of_one_rank_alone_are_refused(comm) -> None:
    x, y, _ = samples(12, 0)
    model, optimizer = ht.distribute(network(), keras.optimizers.SGD(0.1))
    model.compile(optimizer, LOSS)
    # It is best before the first epoch ends, and what follows differs from it.
    stop = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    fit = functools.partial(model.fit, ht.shard((x, y), batch_size=4), epochs=3, verbose=0)
    refused(
        lambda: fit(callbacks=[*ht.keras.callbacks(), stop][: None if comm.rank == 0 else -1]), "HT-parameters-differ"
    )
    fit(callbacks=[stop, *ht.keras.callbacks()])


def gradients_of_other_variables_are_refused(comm) -> None:
    """Equal in shape: nothing but their names tells them apart."""
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, use_bias=False) for _ in range(2))])
    model, _ = ht.distribute(model, keras.optimizers.SGD(0.1))

    def gradient(variable) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((2, 4))))
        tape.gradient(loss, [variable])

    first, second = model.trainable_variables
    gradient(first)
    gradient(second)
    refused(lambda: gradient(second if comm.rank == 1 else first), "HT-ranks-reduce-differently")


def check(comm, folder: Path) -> None:
    any_optimizer_updates_all_ranks_alike(comm)
    ranks_stop_together(comm)
    files_are_written_by_one_rank(comm, folder)
    batch_norms_are_equal_when_they_are_saved_or_evaluated(comm)
    the_best_weights_of_one_rank_alone_are_refused(comm)
