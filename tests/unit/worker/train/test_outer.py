"""The outer step of DiLoCo, in either framework: the formula by hand, and torch.optim.SGD with the same gradient."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.common.recipes.sync import Outer
from hpctrain.worker.comm.single import SingleCommunicator

torch = pytest.importorskip("torch")
OUTER = Outer(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
SHAPES = [(3, 4), (4,), (2, 2, 2)]
ROUNDS = 5


def moves() -> list[list[np.ndarray]]:
    """What the inner steps of each round add to the parameters."""
    random = np.random.default_rng(0)
    return [[random.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(ROUNDS)]


def by_hand(begun: list[np.ndarray]) -> list[np.ndarray]:
    """In float64, each parameter by itself."""
    results = []
    for index, value in enumerate(begun):
        before, velocity = value.astype(np.float64), np.zeros(value.shape)
        for move in moves():
            gradient = before - (before.astype(np.float32) + move[index])
            velocity = 0.9 * velocity + gradient
            before = before - 0.7 * (gradient + 0.9 * velocity)
        results.append(before)
    return results


def begun() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def torch_model() -> torch.nn.ParameterList:
    return torch.nn.ParameterList([torch.nn.Parameter(torch.from_numpy(value)) for value in begun()])


def test_torch_makes_nesterovs_step_with_the_difference() -> None:
    from hpctrain.worker.train.torch_outer import TorchOuter

    model, other = torch_model(), torch_model()
    outer = TorchOuter(model, SingleCommunicator("test"), OUTER)
    reference = torch.optim.SGD(other.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for move in moves():
        for parameter, theirs, each in zip(model, other, move, strict=True):
            theirs.grad = parameter.detach() - (parameter.detach() + torch.from_numpy(each))
            parameter.data += torch.from_numpy(each)
        outer.step()
        reference.step()
        for parameter, theirs in zip(model, other, strict=True):
            torch.testing.assert_close(parameter, theirs, rtol=0, atol=1e-6)
    for parameter, expected in zip(model, by_hand(begun()), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-5)


def test_torch_goes_on_from_a_checkpoint_with_the_same_bits() -> None:
    from hpctrain.worker.train.torch_outer import TorchOuter

    model = torch_model()
    outer = TorchOuter(model, SingleCommunicator("test"), OUTER)
    *first, last = moves()
    for move in first:
        for parameter, each in zip(model, move, strict=True):
            parameter.data += torch.from_numpy(each)
        outer.step()
    saved, state = [each.detach().clone() for each in model], {k: v.clone() for k, v in outer.state.items()}
    resumed = torch.nn.ParameterList([torch.nn.Parameter(each) for each in saved])
    other = TorchOuter(resumed, SingleCommunicator("test"), OUTER)
    other.restore(state)
    for here, one in ((model, outer), (resumed, other)):
        for parameter, each in zip(here, last, strict=True):
            parameter.data += torch.from_numpy(each)
        one.step()
    for parameter, theirs in zip(model, resumed, strict=True):
        assert torch.equal(parameter, theirs)


def test_keras_makes_the_same_step() -> None:
    keras = pytest.importorskip("keras")
    from hpctrain.worker.train.keras_outer import KerasOuter

    variables = [keras.Variable(value) for value in begun()]
    outer = KerasOuter(SimpleNamespace(trainable_variables=variables), SingleCommunicator("test"), OUTER)
    for move in moves():
        for variable, each in zip(variables, move, strict=True):
            variable.assign(variable.value + each)
        outer.step()
    for variable, expected in zip(variables, by_hand(begun()), strict=True):
        np.testing.assert_allclose(np.asarray(variable.value), expected, rtol=0, atol=1e-5)


def test_without_an_outer_optimizer_the_mean_is_taken() -> None:
    from hpctrain.worker.train.torch_outer import TorchOuter

    model = torch_model()
    outer = TorchOuter(model, SingleCommunicator("test"), Outer())
    for parameter in model:
        parameter.data += 1
    outer.step()
    assert not outer.state
    for parameter, value in zip(model, begun(), strict=True):
        np.testing.assert_array_equal(parameter.detach().numpy(), value + 1)
