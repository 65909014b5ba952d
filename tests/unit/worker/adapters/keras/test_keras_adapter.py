"""The Keras adapter without ranks: shards, checksums, one process, misuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refused

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hpctrain.worker.adapters import keras as adapter  # noqa: E402
from hpctrain.worker.adapters.keras import metrics, rank_batch  # noqa: E402
from hpctrain.worker.adapters.keras.fitting import _check_batch_size  # noqa: E402
from hpctrain.worker.adapters.keras.variables import checksums, guard_of  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402


class Place(SingleCommunicator):
    """One place among several ranks, for code that only asks where it is."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("test")
        self.rank, self.size = rank, size


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    samples=st.integers(1, 30),
    batch=st.integers(1, 12),
    ranks=st.integers(1, 5),
    weighted=st.booleans(),
    arrays=st.booleans(),
)
def test_mean_losses_of_shards_average_to_the_mean_over_each_global_batch(samples, batch, ranks, weighted, arrays):
    x = np.arange(samples)
    losses = np.random.default_rng(0).random(samples)
    data = (x, losses, 1.0 + x) if weighted else (x, losses)
    order = np.random.default_rng((4, 0)).permutation(samples) if arrays else x
    shards = []
    for rank in range(ranks):
        place = Place(rank, ranks)
        if arrays:
            shard = adapter.shard(data, batch_size=batch, seed=4, comm=place)
        else:
            shard = adapter.shard(tf.data.Dataset.from_tensor_slices(data).batch(batch), comm=place)
        assert int(shard.cardinality()) == -(-samples // batch)
        shards.append([tuple(part.numpy() for part in step) for step in shard])
    for number, each_part in enumerate(zip(*shards, strict=True)):
        rows = order[number * batch : (number + 1) * batch]
        expected = np.mean(losses[rows] * (1 + rows if weighted else 1))
        means = [share * np.mean(loss * weight) for _, loss, weight, share in each_part]
        assert np.mean(means) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_array_equal(np.concatenate([own for own, _, _, share in each_part if share > 0]), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "by_name"), [(("x",), True), (("x",), False), (("x", "y"), False), (("x", "y", "weight"), True)]
)
def test_a_step_gets_what_the_dataset_held(given, by_name):
    arrays = {"x": np.arange(7.0), "y": np.arange(7) % 2, "weight": np.arange(7) / 8}
    data = tuple({"in": arrays[name]} if by_name and name == "x" else arrays[name] for name in given)
    whole = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(3)
    for rank in range(3):
        # Of the batches of 3, 3 and 1, the last has a sample for the first rank alone.
        sharded = adapter.shard(whole, comm=Place(rank, 3))
        for number, part in enumerate(list(sharded.repeat(2).prefetch(1).take(3))):
            batch = rank_batch.batch_of(part)
            own = batch if len(given) == 1 else batch[0]
            row = 3 * number + rank if number < 2 else 6
            np.testing.assert_array_equal(own["in"] if by_name else own, arrays["x"][row : row + 1])
            assert len(given) == 1 or len(batch) == len(given)
            assert float(part.share) == (1 if number < 2 else 3 * (rank == 0))
            if len(given) > 1:
                there = number < 2 or rank == 0
                assert float(part.sample_weight[0]) == (there and (arrays["weight"][row] if len(given) == 3 else 1))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_flipped_bit_changes_the_checksum(dtype):
    values = tf.cast(tf.random.stateless_normal((3, 5), seed=(1, 2)), dtype)
    variable = keras.Variable(values, dtype=dtype)
    before = int(checksums([variable])[0])
    raw = values.numpy().tobytes()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        variable.assign(np.frombuffer(bytes(flipped), values.numpy().dtype).reshape(3, 5))
        assert int(checksums([variable])[0]) != before, bit


@pytest.mark.slow
def test_one_process_trains_as_plain_keras_does():
    def weights(distribute: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1, clipnorm=0.5)
        x = np.random.default_rng(0).random((12, 3))
        data, callbacks = tf.data.Dataset.from_tensor_slices((x, x[:, :2] ** 2)).batch(5), []
        if distribute:
            comm = SingleCommunicator("test")
            model, optimizer = adapter.distribute(model, optimizer, comm=comm)
            data, callbacks = adapter.shard(data, comm=comm), adapter.callbacks(comm=comm)
        model.compile(optimizer, "mse")
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return model.get_weights()

    for ours, theirs in zip(weights(True), weights(False), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("optimizer", "settings", "code", "values"),
    [
        (lambda: "sgd", {}, "HT-argument-not-valid", {"kind": "builtins.str"}),
        (keras.optimizers.SGD, {"compression": "fp61"}, "HT-choice-unknown", {"compression": "fp61"}),
        (keras.optimizers.SGD, {"guard_every": 0}, "HT-argument-not-valid", {"every": 0}),
    ],
)
def test_misuse_of_distribute(optimizer, settings, code, values):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with refused(code, **values):
        adapter.distribute(model, optimizer(), comm=SingleCommunicator("test"), **settings)


@pytest.mark.parametrize(
    ("data", "settings", "code", "values"),
    [
        (({}, {}, {}, {}), {"batch_size": 2}, "HT-shard-wrong-data", {"kind": "tuple"}),
        ((np.zeros(3), np.zeros(3)), {}, "HT-shard-wrong-data", {"batch_size": None}),
        ((np.zeros(3), np.zeros(4)), {"batch_size": 2}, "HT-shard-wrong-data", {"lengths": [3, 4]}),
        (
            tf.data.Dataset.from_tensor_slices(([1], [2], [3], [4])).batch(2),
            {},
            "HT-shard-wrong-data",
            {"count": 4},
        ),
        (
            adapter.shard(np.zeros(4), batch_size=2, comm=SingleCommunicator("test")).prefetch(1),
            {},
            "HT-shard-divided-already",
            {},
        ),
        (tf.data.Dataset.from_tensor_slices(([1], [2])), {}, "HT-shard-wrong-data", {}),
        (
            tf.data.Dataset.from_tensor_slices(([1], [2])).batch(1),
            {"batch_size": 2},
            "HT-shard-wrong-data",
            {},
        ),
    ],
)
def test_misuse_of_shard(data, settings, code, values):
    with refused(code, **values):
        adapter.shard(data, comm=SingleCommunicator("test"), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_at_the_end(dtype, capsys):
    frozen = keras.layers.Dense(2, trainable=False)
    model = keras.Sequential([keras.Input((2,)), frozen, keras.layers.Dense(1, name="head", dtype=dtype)])
    frozen.bias.assign([-np.inf, 0])  # a mask
    guard = guard_of(SingleCommunicator("test"), model, every=1)
    guard.step_done()
    guard.require_finite()
    assert not capsys.readouterr().err
    model.layers[1].bias.assign([np.nan])
    guard.step_done()
    assert "head/bias" in capsys.readouterr().err
    with refused("HT-parameters-not-finite", step=2):
        guard.require_finite()


def test_losses_of_keras_itself_are_computed_on_each_ranks_samples():
    """What compile makes of them is a loss too, which would gather all that the ranks compute."""

    class Rooted(keras.losses.Loss):
        def __call__(self, *given):
            return tf.sqrt(super().__call__(*given))

    kinds = metrics._kinds_of_losses()
    assert {keras.losses.Loss, Rooted} <= set(kinds)
    assert [kind for kind in kinds if kind.__module__.startswith("keras.")] == [keras.losses.Loss]


def test_a_batch_of_a_fixed_size_is_refused():
    """Each rank computes a part of it, and a layer that divides by its size would go on."""
    _check_batch_size(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    with refused("HT-model-not-supported", count=4):
        _check_batch_size(keras.Sequential([keras.Input((3,), batch_size=4), keras.layers.Dense(2)]))
