"""A convolution and a batch norm in float64, trained in either framework by gradients that are given.

Arrays are PyTorch's: weight (3, 1, 2, 2), bias (3,), gamma (3,), beta (3,).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
import torch

from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.worker.train import keras_rules, torch_rules

STEPS = 50
KINDS = ("weight", "bias", "norm", "norm")
Arrays = list[np.ndarray]

_random = np.random.default_rng(0)
# Both biases start at zero, where a trust ratio is undefined.
START = [_random.normal(size=(3, 1, 2, 2)), np.zeros(3), np.ones(3), np.zeros(3)]
GRADIENTS = [[_random.normal(size=each.shape) for each in START] for _ in range(STEPS)]
# With a step in which nothing has a gradient, as in a residual block that starts as the identity.
INTERRUPTED = [*GRADIENTS[:7], [np.zeros_like(each) for each in START], *GRADIENTS[8:]]
RATES = [0.1 * (1 + math.sin(step)) + 0.01 for step in range(STEPS)]
SHARES = [step / (STEPS - 1) for step in range(STEPS)]


def settings(name: str, **values) -> Optimizer:
    return Optimizer.model_validate({"name": name, "learning_rate": 0.1, **values}, strict=False)


def torch_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.BatchNorm2d(3)).to(dtype)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), START, strict=True):
            parameter.copy_(torch.tensor(value))
    return model


def torch_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: list[Arrays] = GRADIENTS,
    first: int = 0,
    last: int = STEPS,
) -> list[Arrays]:
    """The parameters after each of the steps."""
    path = []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
            if "sgd_share" in group:
                group["sgd_share"] = SHARES[step]
        for parameter, gradient in zip(model.parameters(), gradients[step], strict=True):
            parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        optimizer.step()
        path.append([parameter.detach().numpy().copy() for parameter in model.parameters()])
    return path


def torch_path(values: Optimizer, gradients: list[Arrays] = GRADIENTS) -> list[Arrays]:
    model = torch_model()
    return torch_steps(model, torch_rules.make_optimizer(values, model), gradients)


def keras_model(dtype: str = "float64") -> keras.Model:
    convolution, norm = keras.layers.Conv2D(3, 2, dtype=dtype), keras.layers.BatchNormalization(dtype=dtype)
    model = keras.Sequential([keras.Input((5, 5, 1), dtype=dtype), convolution, norm])
    for variable, value in zip(model.trainable_variables, START, strict=True):
        variable.assign(value.T)
    return model


def keras_steps(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Arrays] = GRADIENTS,
    first: int = 0,
    last: int = STEPS,
) -> list[Arrays]:
    """The parameters after each of the steps, of which all are one graph."""
    variables = model.trainable_variables
    apply = tf.function(lambda given: optimizer.apply(given, variables))
    path = []
    for step in range(first, last):
        optimizer.learning_rate.assign(RATES[step])
        if hasattr(optimizer, "sgd_share"):
            optimizer.sgd_share.assign(SHARES[step])
        apply([tf.constant(gradient.T, variables[0].dtype) for gradient in gradients[step]])
        path.append([variable.numpy().T.copy() for variable in variables])
    return path


def keras_path(values: Optimizer, gradients: list[Arrays] = GRADIENTS) -> list[Arrays]:
    """In float64, the rate too."""
    with keras_in_float64():
        model = keras_model()
        return keras_steps(model, keras_rules.make_optimizer(values, model), gradients)


@contextlib.contextmanager
def keras_in_float64() -> Iterator[None]:
    # Keras makes its policy of layers when it is first asked for, of the type at that moment, and keeps it.
    keras.config.dtype_policy()
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def distance(ours: list[Arrays], theirs: list[Arrays], only: int | None = None) -> float:
    """The largest difference of any number at any step; of one parameter, or of all."""
    pairs = [pair for at_step in zip(ours, theirs, strict=True) for pair in list(zip(*at_step, strict=True))[:only]]
    return max(float(np.abs(one - other).max()) for one, other in pairs)
