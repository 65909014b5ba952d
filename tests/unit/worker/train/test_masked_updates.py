"""Updates that a device is given before the host knows whether gradients are finite, as on a GPU, against others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpctrain.worker.comm.single import SingleCommunicator
from support.digits_recipes import digits_recipe
from support.small_runs import assert_same, assert_same_state, recipe, run

torch = pytest.importorskip("torch")
from hpctrain.worker.train import torch_updates  # noqa: E402
from hpctrain.worker.train.torch_copies import Reading  # noqa: E402
from hpctrain.worker.train.torch_rules import scale_gradients  # noqa: E402
from support.early_updates import AVERAGED, INSIDE, OPTIMIZERS, STEPS, Early, Late, step  # noqa: E402

COMM = SingleCommunicator("test")
# Read first as before: the host keeps its rates.
UNMASKED: dict[str, dict[str, Any]] = {
    "sgd, corrected": {"name": "sgd", "learning_rate": 0.02, **INSIDE, "momentum_correction": True},
}


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a GPU are not read by updates on either side; and a GPU gives the same bits each time."""
    monkeypatch.setattr(torch_updates, "_is_readable", lambda tensor: False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


# Which steps have a bad pixel: the first, one in the middle, two in a row, the last. That of 1e20 has a finite loss and
# finite gradients, whose squares are not.
FAULTS = (({0}, math.nan), ({2}, math.inf), ({0, 1, 3, 4, STEPS - 1}, math.nan), ({2}, 1e20))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "float32") for name in (*OPTIMIZERS, *UNMASKED)),
        *((name, "fp16") for name in ("sgd", "lars", "lamb", "rmsprop")),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(name: str, precision: str):
    settings = digits_recipe(optimizer={**OPTIMIZERS, **UNMASKED}[name], precision=precision, **AVERAGED)
    for faults, bad in FAULTS:
        late, early = Late(settings, COMM), Early(settings, COMM)
        for number in range(STEPS):
            given = bad if number in faults else None
            before = {key: np.array(value) for key, value in early.state().items()}
            loss, *told = step(late, number, given)
            assert step(early, number, given) == (loss, *told)
            assert_same_state(late, early)
            if given not in (None, 1e20):
                assert not math.isfinite(float(loss))
                after = early.state()
                kept = [key for key in before if key.startswith(("model.", "optimizer.", "average."))]
                assert [key for key in kept if not np.array_equal(before[key], after[key])] == []
            elif precision == "float32" and given:
                assert math.isfinite(float(loss))
        if bad != 1e20:
            # All after the first update, which makes the state.
            first = next(number for number in range(STEPS) if number not in faults)
            assert early.early == ([] if name in UNMASKED else [*range(first + 1, STEPS)])
            saved = {key: np.array(value) for key, value in early.state().items()}
    resumed = [kind(settings, COMM) for kind in (Late, Early)]
    for each in resumed:
        each.restore({key: value.copy() for key, value in saved.items()})
    for number, given in enumerate((math.nan, None, math.nan, None)):
        assert step(resumed[0], number, given) == step(resumed[1], number, given)
        assert_same_state(*resumed)


def test_gradients_that_are_not_finite_are_not_clipped():
    """What a record of the step shows of them is what they were."""
    for fault, kept in ((1.0, [math.inf, 3.0]), (0.0, [math.nan, math.nan])):
        gradient = torch.tensor([math.inf, 3.0])
        scale_gradients([gradient], 1.0, torch.tensor(math.inf), torch.tensor(fault))
        np.testing.assert_array_equal(gradient, kept)


def test_a_run_counts_records_and_resumes_as_it_did(tmp_path):
    """A step in the middle is left out, the run is stopped just after it, and resumes with either."""
    settings = recipe(optimizer=OPTIMIZERS["lars"], numbers={"non_finite": "skip"}, epochs=2, **AVERAGED)
    found = []
    for kind in (Late, Early):
        folder = tmp_path / kind.__name__
        stopped = run(folder, kind, settings, odd=20, stop_at=3)
        resumed = run(folder, Early if kind is Late else Late, settings, odd=20, resume_from=3)
        told = [each[0] for each in stopped[0]]
        assert (told[-1], told.count("non_finite")) == ("stopped", 1)
        found.append((stopped, resumed))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    assert found[1][0][2].early == [1, 2]


def test_a_step_read_later_is_given_to_the_device_first(monkeypatch: pytest.MonkeyPatch):
    """No number is read between the losses and the update."""
    trainer, read = Early(digits_recipe(optimizer=OPTIMIZERS["lamb"]), COMM), []
    step(trainer, 0, None)
    weights, original = list(trainer.model.parameters()), Reading.wait
    before = [each.detach().clone() for each in weights]

    def wait(reading: Reading) -> list[float]:
        read.append([not torch.equal(*pair) for pair in zip(before, weights, strict=True)])
        return original(reading)

    monkeypatch.setattr(Reading, "wait", wait)
    step(trainer, 1, None)
    assert len(read) == 1 and all(read[0])
