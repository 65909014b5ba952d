"""The update rules beside other libraries', over 50 steps with a rate that changes (float64).

Keras casts its settings to float32 first: here they are numbers that this leaves as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

import jax
import keras
import optax
import torch

from support.optimizer_runs import (
    GRADIENTS,
    RATES,
    START,
    Arrays,
    distance,
    keras_model,
    keras_path,
    keras_steps,
    settings,
    torch_model,
    torch_path,
    torch_steps,
)

SAME = 1e-10
_BETAS = (0.875, 0.96875)
_EPSILON = 2.0**-20


def of_torch(optimizer: Callable[..., torch.optim.Optimizer], **values) -> list[Arrays]:
    model = torch_model()
    return torch_steps(model, optimizer(model.parameters(), **values))


def of_optax(make: Callable[..., optax.GradientTransformation], **values) -> list[Arrays]:
    with jax.enable_x64(True):
        optimizer = optax.inject_hyperparams(make)(learning_rate=RATES[0], **values)
        weights = [jax.numpy.asarray(each) for each in START]
        state = optimizer.init(weights)
        path = []
        for rate, gradients in zip(RATES, GRADIENTS, strict=True):
            state.hyperparams["learning_rate"] = jax.numpy.asarray(rate)
            updates, state = optimizer.update([jax.numpy.asarray(each) for each in gradients], state, weights)
            weights = optax.apply_updates(weights, updates)
            path.append([np.asarray(each) for each in weights])
        return path


def of_keras(make: Callable[..., keras.optimizers.Optimizer], **values) -> list[Arrays]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        return keras_steps(keras_model(), make(RATES[0], **values))
    finally:
        keras.config.set_floatx(before)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_pytorch(nesterov):
    values = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    theirs = of_torch(torch.optim.SGD, lr=0.1, **values)
    assert distance(keras_path(settings("sgd", **values)), theirs) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_keras(nesterov):
    theirs = of_keras(keras.optimizers.SGD, momentum=0.875, nesterov=nesterov)
    values = {"momentum": 0.875, "nesterov": nesterov}
    assert distance(torch_path(settings("sgd", **values, rate_in_momentum=True)), theirs) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_of_optax(nesterov):
    values = {"momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.5, "nesterov": nesterov}
    theirs = of_optax(optax.lars, **values)
    same = settings("lars", **values, rate_in_momentum=True, trust_denominator="norm_of_sum")
    assert distance(torch_path(same), theirs) < SAME


@pytest.mark.slow
def test_lamb_of_optax():
    assert distance(torch_path(settings("lamb", weight_decay=0.1)), of_optax(optax.lamb, weight_decay=0.1)) < SAME


@pytest.mark.slow
def test_lamb_of_keras():
    theirs = {"beta_1": _BETAS[0], "beta_2": _BETAS[1], "epsilon": _EPSILON}
    ours = settings("lamb", betas=_BETAS, epsilon=_EPSILON)
    assert distance(torch_path(ours), of_keras(keras.optimizers.Lamb, **theirs)) < SAME
