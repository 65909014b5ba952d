"""MomentumSGD against torch.optim.SGD."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras")

from hpctrain.optim.keras_sgd import MomentumSGD  # noqa: E402


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.0, False, 0.0), (0.9, False, 0.0), (0.9, False, 0.01), (0.9, True, 0.01)]
)
def test_equals_pytorch_over_50_steps_with_a_changing_rate(float64, momentum, nesterov, decay):
    random = np.random.default_rng(0)
    shapes = [(4, 3), (3,)]
    start = [random.normal(size=shape) for shape in shapes]
    theirs = [torch.nn.Parameter(torch.tensor(value)) for value in start]
    reference = torch.optim.SGD(theirs, 0.1, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    ours = [keras.Variable(value, dtype="float64") for value in start]
    optimizer = MomentumSGD(0.1, momentum, nesterov, l2=decay)
    for step in range(50):
        rate = 0.1 * (1 + np.sin(step)) + 0.01
        reference.param_groups[0]["lr"] = rate
        optimizer.learning_rate.assign(rate)
        gradients = [random.normal(size=shape) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        reference.step()
        optimizer.apply([keras.ops.convert_to_tensor(gradient) for gradient in gradients], ours)
    for variable, parameter in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(variable.numpy(), parameter.detach().numpy(), rtol=0, atol=1e-12)


def test_is_rebuilt_from_its_settings():
    optimizer = MomentumSGD(0.25, 0.9, nesterov=True, l2=0.5, global_clipnorm=2.0)
    again = MomentumSGD.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert (again.momentum, again.nesterov, again.l2, again.global_clipnorm) == (0.9, True, 0.5, 2.0)
