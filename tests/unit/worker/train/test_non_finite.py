"""What becomes of a run whose numbers go wrong: by a trainer of the test's own, and by both frameworks'."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.common.checkpoints.keep import Policy
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import Event, EventWriter, read_events
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data import load_digits
from hpctrain.worker.data.samples import InMemory, Samples
from hpctrain.worker.data.sampling import epoch_order
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.non_finite import mean_of_finite
from hpctrain.worker.train.state import LazyState
from support.digits_recipes import digits_recipe
from support.refusals import check
from support.trainers import FRAMEWORKS, new_trainer
from support.written_checkpoints import guard_over


def recipe(**values: Any) -> Recipe:
    base = {"batch": {"size": 4}, "epochs": 2, "checkpoints": {"every_steps": 2, "keep_last": 9}}
    return digits_recipe(**{**base, **values})


class Scripted:
    """A trainer whose parameter is the number of its updates; ``losses`` and ``faults`` say how steps go, from 1."""

    framework = "torch"
    parameters = 1
    bucket_mb = None
    communication_seconds = 0.0
    timeline = ()

    def __init__(self, losses: Callable[[int], float], faults: set[int]) -> None:
        self.losses, self.faults = losses, faults
        self.updates, self.loss, self.faulty, self.own_finite = 0, 0.0, False, True
        self.weight = 0
        self.guard = guard_over()
        self.undone: list[int] = []

    def step(self, parts: Any, count: int, scale: float, learning_rate: float, *_: float | None) -> float:
        list(parts)
        self.updates += 1
        self.loss = self.losses(self.updates)
        # As the frameworks' do it: such a loss has no finite gradient.
        self.faulty = self.updates in self.faults or not math.isfinite(self.loss)
        self.own_finite = math.isfinite(self.loss)
        self.weight += not self.faulty
        return self.loss

    def state(self) -> LazyState:
        return LazyState({"weight": np.array([self.weight])})

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self.weight = int(state["weight"][0])

    def undo_forward(self) -> None:
        self.undone.append(self.updates)

    def not_finite_gradients(self) -> list[str]:
        return ["head"]

    def place(self, samples: Samples) -> Samples:
        return samples

    def average_statistics(self) -> None: ...

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        return 0.0, 0


def samples(count: int) -> InMemory:
    return InMemory(samples=Samples(images=np.zeros((count, 1, 1, 1), np.float32), labels=np.arange(count)))


def run(folder: Path, settings: Recipe, trainer: Any, *, train: Any = None, test: Any = None, **options: Any) -> Any:
    """The loop over 12 samples by default: 3 steps an epoch; returns the run's events, and what it raised."""
    comm, raised = SingleCommunicator("test"), None
    resume_from = options.pop("resume_from", 0)
    policy = Policy(last=settings.checkpoints.keep_last)
    with (
        EventWriter(folder / "events.jsonl") as events,
        Checkpoints(folder / "checkpoints", comm, events, policy=policy) as saves,
    ):
        train, test = train or samples(12), test or samples(4)
        loop = Loop(settings, comm, trainer, train, test, events, checkpoints=saves, **options)
        try:
            loop.run(resume_from)
        except HpctrainError as error:
            raised = error
    return list(read_events(folder / "events.jsonl")), raised


def of_kind(events: list[Event], kind: str, *keys: str) -> list[Any]:
    found = [event for event in events if event.event == kind]
    return [tuple(getattr(event, key) for key in keys) for event in found] if keys else found


def constant(step: int) -> float:
    return 1.0


def nan_at(*steps: int) -> Callable[[int], float]:
    return lambda step: math.nan if step in steps else 1.0


def test_stop_is_the_default(tmp_path):
    trainer = Scripted(nan_at(5), set())
    events, error = run(tmp_path, recipe(), trainer)
    assert error.exit_code == 1 and trainer.weight == 4
    values = {"iteration": 5, "epoch": 2, "ranks": [0], "parameters": ["head"], "end": ""}
    check(error, "HT-step-not-finite", **values)
    assert math.isnan(error.values["loss"])
    keys = ("iteration", "epoch", "rule", "ranks", "parameters", "parameter")
    assert of_kind(events, "non_finite", *keys) == [(5, 2, "stop", (0,), 1, "head")]
    assert of_kind(events, "step", "loss")[-1] == (None,)


def test_skipped_steps_have_no_part(tmp_path):
    trainer = Scripted(lambda step: math.inf if step == 2 else float(step), {4})
    events, error = run(tmp_path, recipe(numbers={"non_finite": "skip"}), trainer)
    assert error is None and trainer.weight == 4 and trainer.undone == [2, 4]
    assert of_kind(events, "non_finite", "iteration", "rule", "ranks") == [(2, "skip", (0,)), (4, "skip", ())]
    # The mean of 1 and 3; a finite loss counts although its step was skipped.
    assert of_kind(events, "epoch", "train_loss") == [(2.0,), (5.0,)]
    assert [loss for (loss,) in of_kind(events, "step", "loss")] == [1.0, None, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(("faults", "ends"), [({1, 2}, None), ({1, 2, 4, 5}, None), ({2, 3, 4, 5}, 4)])
def test_so_many_in_a_row_are_skipped_and_no_more(tmp_path, faults, ends):
    settings = recipe(numbers={"non_finite": "skip", "limit": 2})
    events, error = run(tmp_path, settings, Scripted(constant, faults))
    rules = [rule for (rule,) in of_kind(events, "non_finite", "rule")]
    assert rules == ["skip", "skip", "stop"] if ends else ["skip"] * len(faults)
    assert (error is not None) == (ends is not None)
    if ends:
        check(error, "HT-step-not-finite", iteration=ends, epoch=2)
        assert " 2 steps" in error.values["end"]


def test_skipped_steps_in_a_row_are_counted_over_a_resume(tmp_path):
    settings = recipe(numbers={"non_finite": "skip", "limit": 2}, checkpoints={"every_steps": 4, "keep_last": 9})
    _, error = run(tmp_path, settings, Scripted(constant, {3, 4, 5}))
    check(error, "HT-step-not-finite", iteration=5)
    again = Scripted(constant, {3, 4, 5})
    _, error = run(tmp_path, settings, again, resume_from=4)
    check(error, "HT-step-not-finite", iteration=5)
    assert again.weight == 2


def test_an_epoch_without_a_finite_loss_has_none(tmp_path):
    events, error = run(tmp_path, recipe(numbers={"non_finite": "skip"}), Scripted(nan_at(1, 2, 3), set()))
    assert error is None
    assert of_kind(events, "epoch", "train_loss") == [(None,), (1.0,)]
    assert "NaN" not in (tmp_path / "events.jsonl").read_text()


def test_mean_of_finite():
    assert mean_of_finite([1.0, math.nan, 4.0, math.inf], [2, 5, 1, 5]) == 2.0
    assert math.isnan(mean_of_finite([math.nan], [3]))


# Both frameworks: 20 samples in batches of 4, of which one has a pixel that is no number.
TRAIN, TEST = load_digits(test_fraction=0.2, seed=0)
BAD = 7


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def hurt(value: float = math.nan) -> InMemory:
    images = TRAIN.images[:20].copy()
    images[BAD, 3, 3] = value
    return InMemory(samples=Samples(images=images, labels=TRAIN.labels[:20]))


def bits(state: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.items()}


def of_model(trainer: Any) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in trainer.state().items() if name.startswith("model.")}


def one_step(trainer: Any, part: Samples, scale: float | None = None, parts: int = 1) -> float:
    pieces = np.array_split(np.arange(len(part)), parts)
    return float(trainer.step((part[p] for p in pieces), parts, scale or 1 / len(part), 0.05, 1.0))


MOMENTUM = {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}


@pytest.mark.long
@pytest.mark.parametrize("parts", [1, 2])
def test_an_update_by_odd_numbers_is_left_out(framework, parts):
    trainer = new_trainer(framework, recipe(optimizer={**MOMENTUM, "clip_norm": 0.5}, numbers={"non_finite": "skip"}))
    one_step(trainer, TRAIN[:4], parts=parts)
    # The guard counts it as a step.
    counted = ("guard", "iteration")
    before = {n: v.copy() for n, v in trainer.state().items() if not any(each in n for each in counted)}
    assert not trainer.faulty and trainer.updates == 1
    loss = one_step(trainer, hurt().samples[4:8], parts=parts)
    assert trainer.faulty and not trainer.own_finite and trainer.updates == 2
    # TensorFlow's relu and pooling make numbers of NaNs.
    assert math.isnan(loss) or framework == "keras"
    assert trainer.not_finite_gradients()
    trainer.undo_forward()
    after = trainer.state()
    assert {name for name, value in before.items() if value.tobytes() != after[name].tobytes()} == set()
    assert math.isfinite(one_step(trainer, TRAIN[8:12], parts=parts)) and not trainer.faulty


@pytest.mark.long
def test_gradients_whose_norm_overflows_are_not_clipped_to_nan(framework):
    """They are finite, and so is the loss; without clipping they count."""
    for bound in (0.5, None):
        trainer = new_trainer(framework, recipe(optimizer={**MOMENTUM, "clip_norm": bound}))
        one_step(trainer, TRAIN[:4])
        before = bits(of_model(trainer))
        part = TRAIN[4:8]
        loss = one_step(trainer, Samples(images=part.images * np.float32(1e20), labels=part.labels))
        assert math.isfinite(loss) and trainer.own_finite and trainer.faulty is (bound is not None)
        assert (bits(of_model(trainer)) == before) is trainer.faulty
        assert all(np.isfinite(each).all() for each in of_model(trainer).values())


@pytest.mark.slow
def test_a_step_that_is_left_out_counts_only_where_what_was_saved_is_proved(framework):
    """Ranks that are ahead of others when one dies have all been in the comparison ahead of that."""
    trainer, updates = new_trainer(framework, recipe()), []
    trainer.before_update = lambda: updates.append(trainer.updates)
    one_step(trainer, TRAIN[:4], scale=math.nan)
    one_step(trainer, TRAIN[:4])
    assert (updates, trainer.updates) == ([0, 1], 2)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_has_no_update_although_its_gradient_is(framework):
    """Losses whose sum is above what float32 holds, of logits that are finite: p - target is finite too."""
    trainer = new_trainer(framework, recipe())
    state = trainer.state()
    # The biases of the last layer decide alone.
    name = [name for name in state if name.startswith("model.") and state[name].shape == (10,)][-1]
    label = int(TRAIN.labels[0])
    bias = np.zeros(10, np.float32)
    bias[label], bias[label - 1] = -1.5e38, 1.5e38
    trainer.restore({**state, name: bias})
    before = bits(of_model(trainer))
    several = Samples(images=np.repeat(TRAIN.images[:1], 4, axis=0), labels=np.repeat(TRAIN.labels[:1], 4))
    loss = one_step(trainer, several, scale=1.0)
    assert math.isinf(loss) and trainer.faulty
    assert bits(of_model(trainer)) == before


@pytest.mark.thorough
def test_statistics_of_a_skipped_batch_are_taken_back(framework):
    settings = recipe(model={"name": "resnet18"}, data={"name": "imagenet"}, numbers={"non_finite": "skip"})
    trainer = new_trainer(framework, settings)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    batch = Samples(images=images, labels=np.array([3, 500]))
    one_step(trainer, batch)
    before = bits({name: value.copy() for name, value in trainer.state().items() if name.startswith("statistics.")})
    assert before
    images = images.copy()
    images[0, 0, 0, 0] = math.nan
    one_step(trainer, Samples(images=images, labels=batch.labels))
    assert not all(np.isfinite(v).all() for n, v in trainer.state().items() if n.startswith("statistics."))
    trainer.undo_forward()
    assert bits({n: v for n, v in trainer.state().items() if n.startswith("statistics.")}) == before


@pytest.mark.slow
def test_fp16_tells_an_overflow_from_a_fault(framework):
    trainer = new_trainer(framework, recipe(precision="fp16", numbers={"non_finite": "skip"}))
    one_step(trainer, TRAIN[:4], scale=1e6)
    # The scaling's affair.
    assert not trainer.faulty and trainer.updates == 1
    state = trainer.state()
    (scale,) = (name for name in state if name.endswith(("scaler.scale", "dynamic_scale")))
    trainer.restore({**state, scale: np.ones_like(state[scale])})
    one_step(trainer, TRAIN[:4], scale=1e6)
    # There is no factor left to be too large.
    assert trainer.faulty and trainer.updates == 2


def test_a_skipped_step_is_as_if_it_were_not_there(tmp_path):
    """PyTorch by hand, without the batch that has the bad sample in it."""
    torch = pytest.importorskip("torch")
    from hpctrain.common.recipes.sections import ModelSettings
    from hpctrain.worker import models

    settings = recipe(optimizer=MOMENTUM, numbers={"non_finite": "skip"})
    trainer = new_trainer("torch", settings)
    _, error = run(tmp_path, settings, trainer, train=hurt(math.inf), test=InMemory(samples=TEST[:4]))
    assert error is None
    torch.manual_seed(0)
    model = models.build(ModelSettings(name="digits_cnn"), "torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = torch.from_numpy(TRAIN.images).permute(0, 3, 1, 2), torch.from_numpy(TRAIN.labels)
    for epoch in range(2):
        for batch in np.array_split(epoch_order(20, seed=0, epoch=epoch), 5):
            if BAD not in batch:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
    for own, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        np.testing.assert_allclose(own.detach().numpy(), expected.detach().numpy(), rtol=0, atol=1e-6)
