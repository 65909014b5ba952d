"""The outer step of DiLoCo: the formula by hand, and torch.optim.SGD with the same gradient."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes.sync import Outer
from hpctrain.worker.train.local_steps import OuterStep

OUTER = Outer(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
SIZE, ROUNDS = 24, 5
MOVES = np.random.default_rng(0).normal(size=(ROUNDS, SIZE)).astype(np.float32)


class Parameters:
    """The part of a trainer that the step uses, whose only rank has the mean."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values.copy()

    def vector(self) -> np.ndarray:
        return self.values.copy()

    mean_vector = vector

    def set_vector(self, vector: np.ndarray) -> None:
        self.values = vector.copy()


def begun() -> Parameters:
    return Parameters(np.random.default_rng(1).normal(size=SIZE).astype(np.float32))


def begun_step(parameters: Parameters, settings: Outer) -> OuterStep:
    step = OuterStep(parameters, settings)
    step.begin()
    return step


def test_makes_nesterovs_step_with_the_difference() -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = begun(), torch.nn.Parameter(torch.from_numpy(begun().values))
    outer, reference = begun_step(ours, OUTER), torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    before, velocity = ours.values.astype(np.float64), np.zeros(SIZE)
    for move in MOVES:
        theirs.grad = theirs.detach() - (theirs.detach() + torch.from_numpy(move))
        reference.step()
        gradient = before - (before.astype(np.float32) + move)
        velocity = 0.9 * velocity + gradient
        before = before - 0.7 * (gradient + 0.9 * velocity)
        ours.values += move
        outer.step()
        np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.values, before, rtol=0, atol=1e-5)


def test_goes_on_from_a_checkpoint_with_the_same_bits() -> None:
    parameters = begun()
    outer = begun_step(parameters, OUTER)
    for move in MOVES[:-1]:
        parameters.values += move
        outer.step()
    resumed = Parameters(parameters.values)
    other = OuterStep(resumed, OUTER)
    other.restore({name: array.copy() for name, array in outer.state.items()})
    for here, step in ((parameters, outer), (resumed, other)):
        here.values += MOVES[-1]
        step.step()
    np.testing.assert_array_equal(parameters.values, resumed.values)


def test_begins_with_the_parameters_after_the_steps_in_which_all_ranks_were_equal() -> None:
    parameters, other = begun(), begun()
    outer = OuterStep(parameters, OUTER)
    parameters.values += MOVES[0]
    outer.begin()
    parameters.values += MOVES[1]
    outer.step()
    other.values += MOVES[0]
    expected = begun_step(other, OUTER)
    other.values += MOVES[1]
    expected.step()
    np.testing.assert_array_equal(parameters.values, other.values)


def test_without_an_outer_optimizer_the_mean_is_taken() -> None:
    parameters = begun()
    outer = begun_step(parameters, Outer())
    parameters.values += 1
    outer.step()
    assert not outer.state
    np.testing.assert_array_equal(parameters.values, begun().values + 1)
