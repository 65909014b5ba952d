"""The digits network is the same function in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import models

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")


def test_both_frameworks_compute_the_same_logits_from_the_same_weights():
    ours, theirs = models.build("digits_cnn", "torch"), models.build("digits_cnn", "keras")
    weights = [weight.detach().numpy() for weight in ours.parameters()]
    # (out, in, height, width) to (height, width, in, out); dense (out, in) to (in, out)
    weights = [w.transpose(2, 3, 1, 0) if w.ndim == 4 else w.T for w in weights]
    # the first dense layer reads (channel, height, width) in PyTorch and (height, width, channel) in Keras
    weights[6] = weights[6].reshape(64, 2, 2, 128).transpose(1, 2, 0, 3).reshape(256, 128)
    theirs.set_weights(weights)
    images = np.random.default_rng(0).random((5, 8, 8, 1), dtype=np.float32)
    logits = ours(torch.from_numpy(images).movedim(-1, 1)).detach().numpy()
    assert logits.shape == (5, 10)
    np.testing.assert_allclose(theirs(images).numpy(), logits, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_weights_are_drawn_after_he(framework):
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    model = models.build("digits_cnn", framework)
    tensors = [w.detach().numpy() for w in model.parameters()] if framework == "torch" else model.get_weights()
    fan_in = [9, 9 * 32, 9 * 64, 256, 128]
    for weight, fan in zip(tensors[0::2], fan_in, strict=True):
        assert weight.std() == pytest.approx((2 / fan) ** 0.5, rel=0.12)
    assert all(not bias.any() for bias in tensors[1::2])
