"""Networks are the same in both frameworks: counts, outputs, gradients and statistics, by converted weights."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")
pytest.importorskip("tensorflow")

import keras
import tensorflow as tf
import torch

from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker import models
from hpctrain.worker.models.convert import load_state, state_of

# 40 pixels become 5 and 3, which a stride of 2 does not divide: padding then tells frameworks apart.
IMAGES, PIXELS = 2, 40


def pair(name: str):
    """A network in both frameworks, no weight or statistic of which is where it began."""
    torch.manual_seed(0)
    settings = ModelSettings(name=name)
    ours, theirs = models.build(settings, "torch"), models.build(settings, "keras")
    with torch.no_grad():
        for key, tensor in ours.state_dict().items():
            if key.endswith("running_var") or (tensor.ndim == 1 and key.endswith("weight")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim == 1:
                tensor.normal_(std=0.1)
    load_state(theirs, ours.state_dict())
    return ours, theirs


@pytest.fixture(scope="module")
def resnet50():
    return pair("resnet50")


@pytest.fixture(params=["resnet18", "resnet50"])
def float64(request):
    """In float32 a gradient's rounding would hide behind the tolerance, and cross kinks of ReLUs."""
    torch.set_default_dtype(torch.float64)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    # With the kept statistics one network tells as much as two.
    yield pair(request.param), (True,) if request.param == "resnet50" else (False, True)
    torch.set_default_dtype(torch.float32)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def images(dtype) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(IMAGES, PIXELS, PIXELS, 3)).astype(dtype)


def to_torch(array: np.ndarray):
    return torch.from_numpy(np.moveaxis(array, -1, 1).copy())


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("resnet101", 44_549_160)]
)
def test_parameters_are_as_many_as_published(name, parameters):
    with torch.device("meta"):
        model = models.build(ModelSettings(name=name), "torch")
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_both_frameworks_compute_the_same_logits_of_digits():
    ours, theirs = pair("digits_cnn")
    images = np.random.default_rng(0).random((5, 8, 8, 1), dtype=np.float32)
    logits = ours(to_torch(images)).detach().numpy()
    assert logits.shape == (5, 10)
    np.testing.assert_allclose(theirs(images).numpy(), logits, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_outputs_and_statistics_are_equal(resnet50):
    ours, theirs = resnet50
    x = images(np.float32)
    for training in (False, True):
        with torch.no_grad():
            expected = ours.train(training)(to_torch(x)).numpy()
        found = theirs(x, training=training).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    # the second call has moved the statistics
    kept = {key: tensor.numpy() for key, tensor in ours.state_dict().items() if "running" in key}
    for key, value in state_of(theirs).items():
        if key in kept:
            np.testing.assert_allclose(value, kept[key], rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.thorough
def test_gradients_are_equal(float64):
    (ours, theirs), modes = float64
    x, labels = images(np.float64), np.arange(1, 1 + IMAGES)
    for training in modes:
        inputs = to_torch(x).requires_grad_()
        logits = ours.train(training)(inputs)
        ours.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum").backward()
        own = tf.Variable(x)
        with tf.GradientTape() as tape:
            outputs = theirs(own, training=training)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        gradients = tape.gradient(loss, [own, *theirs.trainable_variables])
        np.testing.assert_allclose(outputs.numpy(), logits.detach().numpy(), rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(np.moveaxis(gradients[0].numpy(), -1, 1), inputs.grad.numpy(), rtol=1e-4, atol=1e-10)
        # The conversion of weights converts their gradients too.
        for variable, gradient in zip(theirs.trainable_variables, gradients[1:], strict=True):
            variable.assign(gradient)
        converted = state_of(theirs)
        for key, parameter in ours.named_parameters():
            assert parameter.grad.abs().max() > 0, key
            np.testing.assert_allclose(converted[key], parameter.grad.numpy(), rtol=1e-4, atol=1e-10, err_msg=key)
        load_state(theirs, ours.state_dict())
