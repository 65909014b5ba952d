"""The samples of the next step are taken while a device computes: nothing of a run may change by that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.data.sampling import epoch_order, sample_of
from hpctrain.worker.train.ahead import SamplesAhead
from hpctrain.worker.train.checkpoint import Checkpoints
from hpctrain.worker.train.loop import Loop
from support.digits_recipes import digits_recipe

torch = pytest.importorskip("torch")
from hpctrain.worker.train.torch_copies import ImageCopies  # noqa: E402
from hpctrain.worker.train.torch_trainer import TorchTrainer  # noqa: E402

# Steps of 8 samples in parts of 3, 3 and 2, the last of an epoch of 4.
IMAGES = 44


def recipe(**values: Any) -> Recipe:
    base = {"batch": {"size": 8, "micro_batch": 3}, "epochs": 1, "checkpoints": {"every_steps": 2, "keep_last": 9}}
    return digits_recipe(**{**base, **values})


class OneBuffer:
    """A source that writes all pieces into the same memory.

    Args:
        fails_at: the piece, from 0, at which the stream fails.

    Attributes:
        asked: how many pieces it was asked for.
    """

    broken: frozenset[str] = frozenset()
    fingerprint = "test"

    def __init__(self, samples: Samples, fails_at: float) -> None:
        self.samples, self.fails_at, self.asked = samples, fails_at, 0

    def __len__(self) -> int:
        return len(self.samples)

    def stream(self, pieces: Any, epoch: int) -> Iterator[Samples]:
        images = np.full((8, *self.samples.images.shape[1:]), np.nan, np.float32)
        for piece in pieces:
            if self.asked == self.fails_at:
                raise HpctrainError("HT-data-broken-image", "no such image", exit_code=1)
            self.asked += 1
            chosen = self.samples[sample_of(piece)]
            images[: len(chosen)] = chosen.images
            yield Samples(images=images[: len(chosen)], labels=chosen.labels)
            images.fill(np.nan)


class Asynchronous(TorchTrainer):
    """On a CPU, what a trainer does on a GPU. Notes how many pieces were asked for when each update was done."""

    source: OneBuffer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copies = ImageCopies(torch.device("cpu"))
        self.asked: list[int] = []

    def _update(self) -> None:
        self.asked.append(self.source.asked)
        super()._update()


def run(
    folder: Path,
    kind: type[TorchTrainer],
    settings: Recipe,
    *,
    odd: int | None = None,
    fails_at: float = math.inf,
    stop_at: float = math.inf,
    resume_from: int = 0,
) -> tuple[Any, ...]:
    """The steps and faults of a run, its error, and the trainer.

    Args:
        odd: the place in the first epoch's order of a sample with a pixel that is no number.
        stop_at: how many steps are done when the run is asked to stop.
    """
    folder.mkdir(exist_ok=True)
    comm, error = SingleCommunicator("test"), None
    trainer = kind(settings, comm)
    random = np.random.default_rng(0)
    samples = Samples(images=random.random((IMAGES, 8, 8, 1), np.float32), labels=random.integers(0, 10, IMAGES))
    if odd is not None:
        samples.images[epoch_order(IMAGES, seed=settings.seed, epoch=0)[odd]] = np.nan
    train, test = OneBuffer(samples, fails_at), InMemory(samples=samples[slice(4)])
    trainer.source = train  # type: ignore[attr-defined]
    with EventWriter(folder / "events.jsonl") as events, Checkpoints(folder / "checkpoints", comm, events) as saves:
        loop = Loop(
            settings,
            comm,
            trainer,
            train,
            test,
            events,
            checkpoints=saves,
            dumps=folder / "dumps",
            asked=lambda: "asked" if trainer.updates >= stop_at else None,
        )
        try:
            loop.run(resume_from)
        except HpctrainError as raised:
            error = raised.code
    kept = ("iteration", "epoch", "loss", "learning_rate", "samples", "first", "order", "rule", "to", "parameters")
    told = [
        (event.event, *(repr(getattr(event, name, None)) for name in kept))
        for event in read_events(folder / "events.jsonl")
        if event.event in ("step", "non_finite", "epoch", "stopped", "end")
    ]
    return told, error, trainer


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[:2] == other[:2]
    assert_same_state(one[2], other[2])


def assert_same_state(one: TorchTrainer, other: TorchTrainer) -> None:
    own, its = one.state(), other.state()
    assert set(own) == set(its)
    for name in own:
        np.testing.assert_array_equal(own[name], its[name], err_msg=name)


# In the first step, in a later part of a middle one, in the last of an epoch, and in one that a checkpoint follows.
@pytest.mark.parametrize("odd", [0, 20, IMAGES - 1, 9])
@pytest.mark.parametrize("rule", ["stop", "skip", "roll_back"])
def test_a_step_that_is_not_finite_leaves_what_it_left_before(tmp_path, rule, odd):
    settings = recipe(numbers={"non_finite": rule}, epochs=2)
    found = [run(tmp_path / kind.__name__, kind, settings, odd=odd) for kind in (TorchTrainer, Asynchronous)]
    assert_same(*found)
    told, error, _ = found[0]
    assert [each[0] for each in told].count("non_finite") == (2 if error is None else 1)
    assert (error is None) == (rule == "skip" or (rule == "roll_back" and odd > 15))


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


def test_an_error_of_the_stream_comes_where_its_samples_are_needed(tmp_path):
    """The step before, and its checkpoint, are done and recorded."""
    plain, ahead = (run(tmp_path / kind.__name__, kind, recipe(), fails_at=6) for kind in (TorchTrainer, Asynchronous))
    assert_same(plain, ahead)
    assert plain[1] == "HT-data-broken-image"
    assert [each[0] for each in plain[0]].count("step") == 2


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
