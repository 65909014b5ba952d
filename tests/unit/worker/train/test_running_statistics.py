"""Batch statistics of a residual network in a trainer: of a step's parts, averaged, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.layout import STATISTICS
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.state import State
from support.digits_recipes import digits_recipe
from support.small_resnets import small_resnets
from support.trainers import new_trainer

_RANDOM = np.random.default_rng(0)
SAMPLES = Samples(
    images=_RANDOM.normal(_RANDOM.normal(size=(7, 1, 1, 1)), size=(7, 32, 32, 3)).astype(np.float32),
    labels=_RANDOM.integers(0, 1000, 7),
)
PARTS = (SAMPLES[:3], SAMPLES[3:5], SAMPLES[5:])


def make(framework: str, seed: int) -> Any:
    recipe = digits_recipe(model={"name": "resnet18"}, data={"name": "imagenet"}, batch={"size": 7}, seed=seed)
    return new_trainer(framework, recipe)


@pytest.fixture(scope="module", params=["torch", "keras"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Any]:
    with small_resnets():
        yield make(request.param, 0)


def copy(state: State) -> State:
    return {name: value.copy() for name, value in state.items()}


def statistics(trainer: Any) -> State:
    """Means and variances; PyTorch also counts batches."""
    state = trainer.state().items()
    return {name: value.copy() for name, value in state if name.startswith(STATISTICS) and value.ndim}


def step(trainer: Any, *parts: Samples, rate: float = 0.0) -> None:
    trainer.step(parts, len(parts), 1 / 7, rate, 1.0)


@pytest.mark.long
def test_parts_leave_the_mean_of_what_they_leave_alone(trainer: Any) -> None:
    start, alone = copy(trainer.state()), []
    for part in PARTS:
        trainer.restore(start)
        step(trainer, part)
        alone.append(statistics(trainer))
    trainer.restore(start)
    step(trainer, *PARTS)
    found = statistics(trainer)
    assert len(found) == 12
    for name, value in found.items():
        np.testing.assert_allclose(value, np.mean([each[name] for each in alone], axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_state_goes_on_to_the_same_bits_and_a_ranks_own_may_be_missing(trainer: Any) -> None:
    step(trainer, *PARTS, rate=0.1)
    state, again = copy(trainer.state()), make(trainer.framework, 1)
    # Kept in one place.
    assert not [name for name in state if not name.startswith(STATISTICS) and ("running" in name or "moving" in name)]
    fresh = statistics(again)
    again.restore({name: value for name, value in state.items() if not name.startswith(STATISTICS)})
    kept = statistics(again)
    assert {name for name in kept if kept[name].tobytes() != fresh[name].tobytes()} == set()
    again.restore(state)
    for each in (trainer, again):
        step(each, *PARTS, rate=0.1)
    one, other = trainer.state(), again.state()
    assert one.keys() == other.keys()
    assert {name for name in one if one[name].tobytes() != other[name].tobytes()} == set()


# Above 0, means would leave nothing of the outputs of so small a network, whatever they are.
OTHER = -0.5


class WithOther(SingleCommunicator):
    """Two ranks, of which the other has other statistics."""

    size = 2

    def __init__(self, other: float) -> None:
        super().__init__("test")
        self._other = other

    def allreduce(self, array: Any, reduction: str = "mean") -> Any:
        return (array + self._other) / 2


@pytest.mark.slow
def test_validation_is_with_the_mean_over_the_ranks(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, alone = statistics(trainer), trainer.evaluate(SAMPLES)[0]
    monkeypatch.setattr(trainer, "_comm", WithOther(OTHER))
    trainer.average_statistics()
    for name, value in statistics(trainer).items():
        np.testing.assert_allclose(value, (before[name] + OTHER) / 2, rtol=1e-6)
    averaged = trainer.evaluate(SAMPLES)[0]
    assert averaged != pytest.approx(alone, rel=1e-3)
    trainer.restore({**copy(trainer.state()), **{name: (value + OTHER) / 2 for name, value in before.items()}})
    assert trainer.evaluate(SAMPLES)[0] == pytest.approx(averaged, rel=1e-5)
