"""How often a PyTorch trainer reads from its device in a step. On a GPU, each waits for all that it was given."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from support.digits_recipes import digits_recipe
from support.refusals import refused

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hpctrain.worker.adapters.torch.guarding import guard_over  # noqa: E402
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adamw": {"weight_decay": 0.1},
    "lars": {"momentum": 0.9, "rate_in_momentum": True, "trust_coefficient": 0.01},
    "lamb": {"weight_decay": 0.1},
    "rmsprop_to_sgd": {"transition": {"center": 10.0, "period": 5.0, "rmsprop_rate": 0.05}},
}


class Reads(TorchDispatchMode):
    """Counts the tensors whose values become Python's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        # Guards of earlier tests' models read these as they are collected.
        gc.collect()
        self.count = 0
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return method(*arguments, **named)

        return counted

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **kwargs or {})


def reads(patch: pytest.MonkeyPatch, optimizer: str, precision: str, parts: int) -> int:
    rule = {"name": optimizer, "learning_rate": 0.01, **OPTIMIZERS[optimizer]}
    trainer = TorchTrainer(digits_recipe(precision=precision, optimizer=rule), SingleCommunicator("test"))
    random = np.random.default_rng(0)
    samples = [
        Samples(images=random.random((2, 8, 8, 1), np.float32), labels=random.integers(0, 10, 2)) for _ in range(parts)
    ]
    # The first steps make the optimizer's state, lower the scale of fp16, and prove that the ranks train.
    for _ in range(8):
        trainer.step(samples, parts, 1 / parts, 0.01, 1.0)
    counted = Reads(patch)
    with counted:
        trainer.step(samples, parts, 1 / parts, 0.01, 1.0)
    return counted.count


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [*((each, "float32") for each in OPTIMIZERS), ("sgd", "fp16")],
)
def test_a_step_reads_its_losses_and_the_norm_of_its_gradients_at_once(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, precision: str
):
    """However many micro-batches and parameters there are, and whatever the rule."""
    # On a CPU, where nothing has to be waited for, the updates read numbers that stay on a GPU.
    with monkeypatch.context() as patch:
        once = reads(patch, optimizer, precision, 1)
    with monkeypatch.context() as patch:
        assert (once, reads(patch, optimizer, precision, 4)) == (1, 1)


def test_a_guard_reads_once_whether_all_parameters_are_finite(monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    guard = guard_over(SingleCommunicator("test"), model.named_parameters(), every=1)
    with monkeypatch.context() as patch, Reads(patch) as counted:
        guard.step_done()
        assert counted.count == 1
    with torch.no_grad():
        model[3].bias[1] = torch.inf
    with refused("HT-parameters-not-finite", name="3.bias"):
        guard.require_finite()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(("rule", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", None), ("adamw", None)])
def test_an_update_that_is_given_before_the_reading_is_the_same_to_the_bit(
    rule: str, momentum: float | None, clip_norm: float | None
):
    """As GPUs have it. The first step, the fourth and the fifth have numbers that are not finite, or are too large."""
    settings = {"name": rule, "learning_rate": 0.01, "clip_norm": clip_norm, **OPTIMIZERS.get(rule, {})}
    if momentum is not None:
        settings["momentum"] = momentum
    found: list[list[Any]] = []
    for early in (False, True):
        trainer = TorchTrainer(digits_recipe(optimizer=settings), SingleCommunicator("test"))
        assert trainer._can_update_early
        trainer._updates_early = early
        random, seen = np.random.default_rng(0), []
        for step in range(6):
            images = random.random((4, 8, 8, 1), np.float32) * {0: np.nan, 3: np.inf, 4: 1e30}.get(step, 1)
            loss = trainer.step([Samples(images=images, labels=random.integers(0, 10, 4))], 1, 1 / 4, 0.01, 1.0)
            state = trainer.state()
            seen.append((loss, trainer.updates, trainer.faulty, trainer.own_finite, *(state[name] for name in state)))
        found.append(seen)
    for own, other in zip(*found, strict=True):
        np.testing.assert_equal(other, own)
    assert [step[2] for step in found[0]][:4] == [True, False, False, True]
