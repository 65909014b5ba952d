"""The samples of the next step are taken while a device computes: nothing of a run may change by that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.feed import SamplesAhead
from support.small_runs import IMAGES, OneBuffer, assert_same, assert_same_state, recipe, run

torch = pytest.importorskip("torch")
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402


class Asynchronous(TorchTrainer):
    """On a CPU, what a trainer does on a GPU. Notes how many pieces were asked for when each update was done."""

    source: OneBuffer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inputs.copies = True
        self.asked: list[int] = []

    def _update(self) -> None:
        self.asked.append(self.source.asked)
        super()._update()


class Early(Asynchronous):
    """Gives the update before it has read whether the step is finite, too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates_early = self._optimizer.defaults["fused"]
        assert self._updates_early


# In the first step, in a later part of a middle one, in the last of an epoch, and in one that a checkpoint follows.
@pytest.mark.parametrize("odd", [0, 20, IMAGES - 1, 9])
@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_a_step_that_is_not_finite_leaves_what_it_left_before(tmp_path, rule, odd):
    settings = recipe(numbers={"non_finite": rule}, epochs=2)
    found = [run(tmp_path / kind.__name__, kind, settings, odd=odd) for kind in (TorchTrainer, Asynchronous, Early)]
    for each in found[1:]:
        assert_same(found[0], each)
    told, error, _ = found[0]
    assert [each[0] for each in told].count("non_finite") == (2 if error is None else 1)
    assert (error is None) == (rule == "skip")


def test_samples_are_taken_one_step_ahead_and_an_epoch_ends_where_it_did(tmp_path):
    plain, ahead = (run(tmp_path / kind.__name__, kind, recipe(epochs=2)) for kind in (TorchTrainer, Asynchronous))
    assert_same(plain, ahead)
    # Parts of steps: 3 in each of five, 2 in the last; the first part of the next step is asked for before the update.
    first = [3 * step + 1 for step in range(1, 6)]
    assert ahead[2].asked == [*first, 17, *(17 + each for each in first), 34]


def test_a_run_that_was_stopped_resumes_with_the_samples_that_were_taken_ahead(tmp_path):
    whole = run(tmp_path / "whole", TorchTrainer, recipe())
    stopped = run(tmp_path / "ahead", Asynchronous, recipe(), stop_at=3)
    assert stopped[0][-1][0] == "stopped"
    resumed = run(tmp_path / "ahead", Asynchronous, recipe(), resume_from=3)
    steps = [each for each in whole[0] if each[0] == "step"]
    assert [each for each in resumed[0] if each[0] == "step"] == steps
    assert_same_state(whole[2], resumed[2])


def test_an_error_is_raised_again_and_the_end_too():
    def stream() -> Iterator[Samples]:
        yield Samples(images=np.zeros((1, 1, 1, 1), np.float32), labels=np.zeros(1, np.int64))
        raise ValueError

    ahead = SamplesAhead(stream(), lambda samples: samples)
    ahead.fetch()
    ahead.fetch()
    assert len(next(ahead)) == 1
    ahead.fetch()
    for _ in range(2):
        with pytest.raises(ValueError):
            next(ahead)
    ended = SamplesAhead(iter(()), lambda samples: samples)
    ended.fetch()
    assert list(ended) == []
