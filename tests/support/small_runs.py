"""Runs of a small network in this process, with checkpoints, for tests that compare trainers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.data.sampling import epoch_order, sample_of
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from support.digits_recipes import digits_recipe

if TYPE_CHECKING:
    from hpctrain.worker.train.torch_trainer import TorchTrainer

# Steps of 8 samples in parts of 3, 3 and 2, the last of an epoch of 4.
IMAGES = 44


def recipe(**values: Any) -> Recipe:
    """One epoch of six steps, in micro-batches, with checkpoints; unless ``values`` say otherwise."""
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
            asked=lambda: "asked" if trainer.updates >= stop_at else None,
        )
        try:
            loop.run(resume_from)
        except HpctrainError as raised:
            error = raised.code
    kept = ("iteration", "epoch", "loss", "learning_rate", "samples", "first", "order", "rule", "parameters")
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
