"""One definition of clip_norm: gradients times min(1, bound / norm over all of them), in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

import keras
import torch

from hpctrain.worker.train import keras_rules
from hpctrain.worker.train.torch_rules import scale_gradients, total_norm
from support.optimizer_runs import START, keras_in_float64, settings
from support.torch_operations import Operations


def in_torch(gradients, bound):
    parameters = [torch.nn.Parameter(torch.zeros_like(torch.tensor(each))) for each in gradients]
    idle = torch.nn.Parameter(torch.zeros(3))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    norm = total_norm([*parameters[:1], idle, *parameters[1:]])
    scale_gradients([parameter.grad for parameter in parameters], bound, norm)
    assert idle.grad is None
    return [parameter.grad.numpy() for parameter in parameters]


def in_keras(gradients, bound):
    """By the change that a rate of 1 makes of variables that are 0."""
    with keras_in_float64():
        net = keras.Sequential(
            [keras.Input((len(gradients),), dtype="float64"), keras.layers.Dense(1, dtype="float64")]
        )
        optimizer = keras_rules.make_optimizer(settings("sgd", clip_norm=bound), net)
        optimizer.learning_rate.assign(1.0)
        kernel, bias = net.trainable_variables
        kernel.assign(np.zeros(kernel.shape))
        optimizer.apply([np.array(gradients)[:, None], np.zeros(1)], [kernel, bias])
        return -kernel.numpy()[:, 0]


@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-9])
@pytest.mark.parametrize("part", [0.5, 0.999999, 1.5])
def test_gradients_are_scaled_to_the_bound(size, part):
    """At a norm of 1e-5, the 1e-6 that PyTorch's own function adds to it would be a tenth."""
    gradients = [size * each for each in START]
    norm = np.sqrt(sum((each**2).sum() for each in gradients))
    expected = [each * min(1.0, part) for each in gradients]
    for ours, wanted in zip(in_torch(gradients, part * norm), expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-12, atol=0)
    flat = np.concatenate([each.ravel() for each in gradients])
    clipped = in_keras(list(flat), part * norm)
    np.testing.assert_allclose(clipped, flat * min(1.0, part), rtol=1e-12, atol=1e-20)


def test_gradients_of_zero_stay_and_infinite_ones_are_not_made_finite():
    assert not any(each.any() for each in in_torch([np.zeros(3), np.zeros((2, 2))], 0.1))
    assert not in_keras([0.0, 0.0], 0.1).any()
    assert np.isnan(in_torch([np.array([np.inf, 1.0])], 0.1)[0]).all()


def test_clipping_is_as_many_operations_for_any_number_of_gradients():
    def given(count):
        gradients = [torch.ones(3) for _ in range(count)]
        with Operations() as operations:
            scale_gradients(gradients, 1.0, torch.tensor(5.0))
        assert all(torch.equal(each, torch.full((3,), 0.2)) for each in gradients)
        return operations.count

    assert given(1) == given(40) and given(0) < given(1)
