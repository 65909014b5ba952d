"""The digits network is the same function in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

import keras
import torch

from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker import models
from hpctrain.worker.models.convert import load_state


def test_both_frameworks_compute_the_same_logits_from_the_same_weights():
    ours, theirs = (models.build(ModelSettings(name="digits_cnn"), framework) for framework in ("torch", "keras"))
    load_state(theirs, ours.state_dict())
    images = np.random.default_rng(0).random((5, 8, 8, 1), dtype=np.float32)
    logits = ours(torch.from_numpy(images).movedim(-1, 1)).detach().numpy()
    assert logits.shape == (5, 10)
    np.testing.assert_allclose(theirs(images).numpy(), logits, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_weights_are_drawn_after_he(framework):
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    model = models.build(ModelSettings(name="digits_cnn"), framework)
    tensors = [w.detach().numpy() for w in model.parameters()] if framework == "torch" else model.get_weights()
    fan_in = [9, 9 * 32, 9 * 64, 256, 128]
    for weight, fan in zip(tensors[0::2], fan_in, strict=True):
        assert weight.std() == pytest.approx((2 / fan) ** 0.5, rel=0.12)
    assert all(not bias.any() for bias in tensors[1::2])
