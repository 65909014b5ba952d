"""Batch norm over parts of a batch against PyTorch's own layer on each part, in both frameworks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.common.recipes.sections import Batch, BatchNormSettings
from hpctrain.worker.comm.base import Group
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.models.batch_norm import WHOLE, Extent, extent

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from hpctrain.worker.models import keras_batch_norm, torch_batch_norm  # noqa: E402

CHANNELS, EPSILON = 5, 1e-3


class Ranks(SingleCommunicator):
    """As many ranks as asked for; their groups only say how many they are."""

    def __init__(self, size: int) -> None:
        super().__init__("")
        self.size = size

    def group(self, size: int | None = None, what: str = "") -> Group:
        return ("group", size)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("span", "ranks", "at_once", "expected"),
    [
        (None, 4, 8, WHOLE),
        (8, 4, 8, WHOLE),
        (3, 4, 8, Extent(part=3)),
        (16, 4, 8, Extent(group=("group", 2))),
        (32, 4, 8, Extent(group=("group", None))),
        ("world", 4, 8, Extent(group=("group", None))),
        ("world", 1, 8, WHOLE),
    ],
)
def test_span_becomes_parts_or_groups(span, ranks, at_once, expected):
    assert extent(BatchNormSettings(span=span), Ranks(ranks), at_once=at_once) == expected


@pytest.mark.parametrize(
    ("batch", "ranks", "at_once"),
    [
        (Batch(size=256), 8, 32),
        (Batch(size=256), 3, 86),
        (Batch(size=256, micro_batch=32), 4, 32),
        (Batch(size=172, micro_batch=32), 4, 22),
        (Batch(size=8, micro_batch=32), 4, 2),
        (Batch(per_rank=32, emulated_ranks=256).at(2), 2, 32),
    ],
)
def test_images_that_a_rank_computes_at_once(batch, ranks, at_once):
    assert batch.at_once(ranks) == at_once


def given(images: int):
    """Images (N, H, W, C) that differ in mean from each other and by channel, gradients of the outputs, gamma, beta."""
    random = np.random.default_rng(images)
    x = random.normal(random.normal(size=(images, 1, 1, CHANNELS)), size=(images, 4, 3, CHANNELS))
    return x, random.normal(size=x.shape), random.uniform(0.5, 1.5, CHANNELS), random.normal(size=CHANNELS)


def expected(images: int, parts: int, kept: float) -> dict[str, np.ndarray]:
    """PyTorch's own layer, one for each part; what they keep is averaged."""
    x, cotangent, gamma, beta = given(images)
    found: dict[str, list] = {}
    cuts = np.array_split(np.arange(images), parts)
    for cut in cuts:
        layer = torch.nn.BatchNorm2d(CHANNELS, eps=EPSILON, momentum=1 - kept, dtype=torch.float64)
        layer.load_state_dict({"weight": torch.tensor(gamma), "bias": torch.tensor(beta)}, strict=False)
        own = torch.from_numpy(np.moveaxis(x[cut], -1, 1)).requires_grad_()
        y = layer(own)
        y.backward(torch.from_numpy(np.moveaxis(cotangent[cut], -1, 1)))
        values = {"y": y, "x": own.grad, "gamma": layer.weight.grad, "beta": layer.bias.grad}
        for name, value in (values | {"mean": layer.running_mean, "variance": layer.running_var}).items():
            array = value.detach().numpy()
            found.setdefault(name, []).append(np.moveaxis(array, 1, -1) if array.ndim == 4 else array)
    joined = {name: np.concatenate(found[name]) for name in ("y", "x")}
    joined |= {name: np.sum(found[name], axis=0) for name in ("gamma", "beta")}
    return joined | {name: np.mean(found[name], axis=0) for name in ("mean", "variance")}


def of_torch(layers: Extent, images: int, kept: float, dtype) -> dict[str, np.ndarray]:
    x, cotangent, gamma, beta = (torch.tensor(array, dtype=dtype) for array in given(images))
    layer = torch_batch_norm.TorchBatchNorm(CHANNELS, extent=layers, momentum=kept, epsilon=EPSILON).to(dtype)
    layer.load_state_dict({"weight": gamma, "bias": beta}, strict=False)
    x = x.movedim(-1, 1).requires_grad_()
    y = layer(x)
    y.backward(cotangent.movedim(-1, 1))
    assert layer.num_batches_tracked == 1
    found = {"gamma": layer.weight.grad, "beta": layer.bias.grad}
    found |= {"mean": layer.running_mean, "variance": layer.running_var}
    found |= {"y": y.detach().movedim(1, -1), "x": x.grad.movedim(1, -1)}
    return {name: tensor.numpy() for name, tensor in found.items()}


def of_keras(layers: Extent, images: int, kept: float, dtype: str) -> dict[str, np.ndarray]:
    x, cotangent, gamma, beta = (array.astype(dtype) for array in given(images))
    layer = keras_batch_norm.KerasBatchNorm(extent=layers, momentum=kept, epsilon=EPSILON, dtype=dtype)
    layer.build(x.shape)
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)

    # A graph that does not know how many images there are.
    @tf.function(input_signature=[tf.TensorSpec((None, None, None, CHANNELS), dtype)] * 2)
    def graph(x, cotangent):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, [x, layer.gamma.value, layer.beta.value], cotangent)

    y, gradients = graph(x, cotangent)
    found = dict(zip(("x", "gamma", "beta"), gradients, strict=True)) | {"y": y}
    found |= {"mean": layer.moving_mean.value, "variance": layer.moving_variance.value}
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "part", "parts", "kept"),
    [(8, 4, 2, 0.9), (7, 3, 3, 0.0), (7, 2, 4, 0.9), (3, 4, 1, 0.9), (5, 1, 5, 0.0)],
)
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_parts_are_those_of_a_loop_over_them(framework, images, part, parts, kept):
    run, dtype = {"torch": (of_torch, torch.float64), "keras": (of_keras, "float64")}[framework]
    found = run(Extent(part=part), images, kept, dtype)
    for name, value in expected(images, parts, kept).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kept", [0.9, 0.0])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_parts_of_a_step_one_after_another_leave_what_as_many_ranks_leave(framework, kept):
    x = given(7)[0]
    cuts = np.array_split(np.arange(7), 3)
    if framework == "torch":
        layer = torch_batch_norm.TorchBatchNorm(CHANNELS, momentum=kept).double()
    else:
        layer = keras_batch_norm.KerasBatchNorm(momentum=kept, dtype="float64")
        layer.build(x.shape)
        graph = tf.function(
            lambda part: layer(part, training=True), input_signature=[tf.TensorSpec((None, 4, 3, CHANNELS), "float64")]
        )
    mean, variance = np.zeros(CHANNELS), np.ones(CHANNELS)
    for _ in range(2):
        for number, cut in enumerate(cuts, start=1):
            layer.begin_part(number, len(cuts))
            layer(torch.from_numpy(x[cut]).movedim(-1, 1)) if framework == "torch" else graph(x[cut])
        # Each rank has one part, and what they keep is averaged.
        mean = kept * mean + (1 - kept) * np.mean([x[cut].mean((0, 1, 2)) for cut in cuts], axis=0)
        variance = kept * variance + (1 - kept) * np.mean([x[cut].var((0, 1, 2), ddof=1) for cut in cuts], axis=0)
        x = x[::-1] * 1.5
    names = ("running_mean", "running_var") if framework == "torch" else ("moving_mean", "moving_variance")
    found = [np.asarray(getattr(layer, name)) for name in names]
    np.testing.assert_allclose(found, [mean, variance], rtol=1e-12)


@pytest.mark.parametrize(("images", "part"), [(1, None), (3, 1), (3, 2)])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_one_value_a_channel_has_no_variance(framework, images, part):
    """As of the smallest images after the last stage: PyTorch's own layer refuses them."""
    x = np.random.default_rng(0).normal(size=(images, 1, 1, CHANNELS))
    if framework == "torch":
        layer = torch_batch_norm.TorchBatchNorm(CHANNELS, extent=Extent(part=part), momentum=0.0).double()
        given = torch.from_numpy(x).movedim(-1, 1).requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        gradient, variance = given.grad.numpy(), layer.running_var.numpy()
    else:
        layer = keras_batch_norm.KerasBatchNorm(extent=Extent(part=part), momentum=0.0, dtype="float64")
        given = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = layer(given, training=True)
            loss = tf.reduce_sum(tf.square(y))
        gradient, variance = tape.gradient(loss, given).numpy(), layer.moving_variance.numpy()
    alone = -1 if part == 2 else slice(None)
    outputs = y.detach().movedim(1, -1).numpy() if framework == "torch" else y.numpy()
    np.testing.assert_allclose(outputs[alone], 0, atol=1e-12)
    np.testing.assert_allclose(gradient[alone], 0, atol=1e-12)
    expected = np.var(x[:2], axis=(0, 1, 2), ddof=1) / 2 if part == 2 else np.zeros(CHANNELS)
    np.testing.assert_allclose(variance, expected, atol=1e-12)


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_the_whole_batch_in_float32_keeps_the_unbiased_variance(framework):
    run, dtype = {"torch": (of_torch, torch.float32), "keras": (of_keras, "float32")}[framework]
    found = run(WHOLE, 2, 0.9, dtype)
    for name, value in expected(2, 1, 0.9).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layers", [WHOLE, Extent(part=2), Extent(group=SingleCommunicator("").group())])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_half_precision_goes_in_and_out_and_statistics_stay_exact(framework, layers):
    x = given(4)[0]
    if framework == "torch":
        layer = torch_batch_norm.TorchBatchNorm(CHANNELS, extent=layers, momentum=0.0)
        y = layer(torch.from_numpy(x).bfloat16().movedim(-1, 1))
        assert y.dtype == torch.bfloat16
        mean = layer.running_mean.numpy()
    else:
        layer = keras_batch_norm.KerasBatchNorm(extent=layers, momentum=0.0, dtype="mixed_bfloat16")
        y = layer(x, training=True)
        assert y.dtype == tf.bfloat16
        mean = layer.moving_mean.numpy()
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, x.mean(axis=(0, 1, 2)), atol=5e-3)


def test_sums_of_branches_that_need_nothing_of_each_other_keep_the_order_of_the_program():
    group = SingleCommunicator("").group()
    branches = [keras_batch_norm.KerasBatchNorm(extent=Extent(group=group)) for _ in range(3)]
    for layer in branches:
        layer.build((None, None, None, CHANNELS))

    @tf.function(input_signature=[tf.TensorSpec((None, 4, 3, CHANNELS))])
    def graph(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.add_n([layer(x, training=True) for layer in branches])
        return tape.gradient(y, x)

    operations = graph.get_concrete_function().graph.get_operations()
    sums = [operation for operation in operations if operation.type == "PyFunc"]
    assert len(sums) == 6
    assert all(first in second.control_inputs for first, second in itertools.pairwise(sums))


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_validation_takes_the_kept_statistics(framework):
    x, _, gamma, beta = given(4)
    mean, variance = np.arange(CHANNELS) / 10, np.arange(1, CHANNELS + 1.0)
    for layers in (WHOLE, Extent(part=2), Extent(group=SingleCommunicator("").group())):
        if framework == "torch":
            layer = torch_batch_norm.TorchBatchNorm(CHANNELS, extent=layers, epsilon=EPSILON).double().eval()
            state = {"weight": gamma, "bias": beta, "running_mean": mean, "running_var": variance}
            layer.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=False)
            y = layer(torch.from_numpy(x).movedim(-1, 1)).movedim(1, -1).detach().numpy()
        else:
            layer = keras_batch_norm.KerasBatchNorm(extent=layers, epsilon=EPSILON, dtype="float64")
            layer.build(x.shape)
            layer.set_weights([gamma, beta, mean, variance])
            y = layer(x).numpy()
        np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + EPSILON) * gamma + beta, rtol=1e-9, atol=1e-9)
