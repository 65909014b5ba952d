"""Weights of convolutions that lie in memory as images do, which recipes have on a GPU, against contiguous ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.layout import checkpoint_path
from hpctrain.common.checkpoints.read import read_state
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from support.digits_recipes import digits_recipe
from support.small_runs import assert_same_state, recipe, run

torch = pytest.importorskip("torch")
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

COMM = SingleCommunicator("test")

MOMENTUM = {"momentum": 0.9, "weight_decay": 1e-3}
LARS = {**MOMENTUM, "rate_in_momentum": True, "trust_coefficient": 0.02}
TRANSITION = {"center": 1.0, "period": 1.0, "rmsprop_rate": 0.005}
# For each optimizer, with what else lies in memory as its parameters do.
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.02, **MOMENTUM}, "averaging": {"decay": 0.8}},
    "adamw": {"optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}},
    "lars": {"optimizer": {"name": "lars", "learning_rate": 0.5, **LARS}},
    "lamb": {"optimizer": {"name": "lamb", "learning_rate": 0.01, "weight_decay": 0.01}},
    "rmsprop": {"optimizer": {"name": "rmsprop_to_sgd", "learning_rate": 0.02, **MOMENTUM, "transition": TRANSITION}},
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, its convolutions give the same bits each time, and do not round to 19 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class ChannelsLast(TorchTrainer):
    """The layout that a trainer has on a GPU."""

    def _has_channels_last(self) -> bool:
        return True


class Contiguous(TorchTrainer):
    """The layout that a trainer has on a CPU."""

    def _has_channels_last(self) -> bool:
        return False


def strided(trainer: TorchTrainer) -> list[Any]:
    """The weights of a trainer that are not contiguous."""
    return [each for each in trainer.model.parameters() if not each.is_contiguous()]


def train(trainer: TorchTrainer) -> None:
    """Three steps, in two parts each."""
    rate = trainer._optimizer.param_groups[0]["lr"]
    for number in range(3):
        random = np.random.default_rng(number)
        parts = [
            Samples(images=random.random((4, 8, 8, 1), np.float32), labels=random.integers(0, 10, 4)) for _ in range(2)
        ]
        trainer.step(parts, 2, 1 / 8, rate, number / 3, 0.2 if trainer._average else None)


def assert_near(one: TorchTrainer, other: TorchTrainer) -> None:
    own, its = one.state(), other.state()
    assert set(own) == set(its)
    for name in own:
        np.testing.assert_allclose(own[name], its[name], rtol=0, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_states_of_either_layout_resume_in_the_other(case):
    settings, kinds = digits_recipe(**CASES[case]), (Contiguous, ChannelsLast)
    trainers = {kind: kind(settings, COMM) for kind in kinds}
    for trainer in trainers.values():
        train(trainer)
    saved = {kind: {name: np.array(each) for name, each in found.state().items()} for kind, found in trainers.items()}
    for trainer in trainers.values():
        train(trainer)
    assert_near(*trainers.values())
    for before, after in itertools.product(kinds, kinds):
        resumed = after(settings, COMM)
        # A trainer may keep the memory that it is given.
        resumed.restore({name: each.copy("K") for name, each in saved[before].items()})
        train(resumed)
        (assert_same_state if before is after else assert_near)(resumed, trainers[after])
        weights = strided(resumed)
        assert len(weights) == (2 if after is ChannelsLast else 0)
        for weight in weights:
            kept = [each for each in resumed._optimizer.state[weight].values() if each.shape == weight.shape]
            assert kept and all(each.stride() == weight.stride() for each in kept)


def test_a_checkpoint_has_the_numbers_in_the_order_of_their_indices(tmp_path):
    *_, trainer = run(tmp_path, ChannelsLast, recipe(**CASES["adamw"]))
    _, state = read_state(checkpoint_path(tmp_path / "checkpoints", 6), 0, 1)
    assert strided(trainer)
    for name, weight in trainer.model.named_parameters():
        np.testing.assert_array_equal(state[f"model.{name}"], weight.detach().cpu().numpy())
