"""How networks are drawn in both frameworks: the distributions of their weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("torch")
pytest.importorskip("keras")

import keras
import torch

from hpctrain.common.recipes.sections import InitialWeights, ModelSettings
from hpctrain.worker import models
from hpctrain.worker.models.convert import state_of

# A significance that 40 draws with a seed each do not come near by chance.
LEAST = 1e-4
# Weights of a kernel that are compared with a distribution: they show a deviation of one percent.
SAMPLE = 50_000

WEIGHTS = {
    "Goyal et al.": InitialWeights(),
    "NVIDIA": InitialWeights(fan="in", last_layer="uniform"),
    "TensorFlow": InitialWeights(fan="in", scale=1.0, truncated=True),
    "out, truncated": InitialWeights(truncated=True, last_layer="uniform"),
}


def sample(kernel: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).choice(kernel.ravel(), min(SAMPLE, kernel.size), replace=False)


def drawn(framework: str, model: ModelSettings) -> dict[str, np.ndarray]:
    if framework == "keras":
        keras.utils.set_random_seed(3)
        return state_of(models.build(model, "keras"))
    torch.manual_seed(3)
    return {name: tensor.numpy() for name, tensor in models.build(model, "torch").state_dict().items()}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_have_the_distribution_that_the_recipe_says(framework, name):
    weights = WEIGHTS[name]
    state = drawn(framework, ModelSettings(name="resnet18", weights=weights))
    # Kernels whose fan in is not the fan out: (out, in, height, width).
    for key in ("conv1.weight", "layer2.0.conv1.weight", "layer4.0.conv1.weight", "layer3.0.downsample.0.weight"):
        kernel = state[key]
        outputs, inputs, *size = kernel.shape
        assert inputs != outputs
        deviation = math.sqrt(weights.scale / ((inputs if weights.fan == "in" else outputs) * math.prod(size)))
        expected = stats.norm(scale=deviation)
        if weights.truncated:
            expected = stats.truncnorm(-2, 2, scale=deviation / stats.truncnorm(-2, 2).std())
            assert abs(kernel).max() <= expected.support()[1] * (1 + 1e-6)
        else:
            assert abs(kernel).max() > 3 * deviation
        assert kernel.std() == pytest.approx(deviation, rel=5 / math.sqrt(kernel.size))
        assert stats.kstest(sample(kernel), expected.cdf).pvalue > LEAST, key
    inputs = state["fc.weight"].shape[1]
    if weights.last_layer == "normal":
        assert stats.kstest(sample(state["fc.weight"]), stats.norm(scale=0.01).cdf).pvalue > LEAST
        assert not state["fc.bias"].any()
    else:
        uniform = stats.uniform(-1 / math.sqrt(inputs), 2 / math.sqrt(inputs))
        for each in (state["fc.weight"], state["fc.bias"]):
            assert stats.kstest(sample(each), uniform.cdf).pvalue > LEAST


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_gamma_is_one_or_zero_in_the_last_batch_norm_of_each_block(framework):
    for zero_gamma in (False, True):
        state = drawn(framework, ModelSettings(name="resnet18", zero_gamma=zero_gamma))
        gammas = [value for key, value in state.items() if "layer" in key and key.endswith("bn2.weight")]
        assert len(gammas) == 8
        assert all((value == (0 if zero_gamma else 1)).all() for value in gammas)
