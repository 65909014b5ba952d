"""The loop: which samples a step gets, with which weight, and what is recorded."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import pytest

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.worker import energy_meter
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import BROKEN, InMemory, Samples
from hpctrain.worker.energy_meter import HostMeter
from hpctrain.worker.train import loop
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from hpctrain.worker.train.state import LazyState
from support.digits_recipes import digits_recipe
from support.power_zones import SERVER, PowerZones
from support.refusals import refused
from support.written_checkpoints import guard_over


class Recorder:
    """A trainer without a model: the loss of a sample is its label, and odd labels are classified rightly."""

    framework = "torch"
    parameters = 3
    bucket_mb = None
    communication_seconds = 0.25
    loss = 0.0
    faulty, own_finite = False, True
    timeline = ((0.0, "gradient", 0), (0.1, "launched", 0), (0.2, "finished", 0))

    def __init__(self) -> None:
        self.steps: list[tuple[list[list[int]], float, float]] = []
        self.trained: list[list[int]] = []
        self.updates = 0
        self.sgd_shares: list[float] = []
        self.order: list[str] = []
        self.guard = guard_over()

    def step(self, parts, count, scale, learning_rate, sgd_share, *_):
        parts = list(parts)
        assert len(parts) == count
        self.sgd_shares.append(sgd_share)
        self.order.append("step")
        self.trained.append(np.concatenate([part.labels for part in parts]).tolist())
        self.steps.append(([part.labels.tolist() for part in parts], scale, learning_rate))
        return scale * float(sum(part.labels[part.labels != BROKEN].sum() for part in parts))

    def state(self):
        self.order.append("save")
        return LazyState({"trained": np.array(sum(self.trained, []), np.int64)})

    def restore(self, state):
        self.trained.append(state["trained"].tolist())

    def place(self, samples):
        return samples

    def average_statistics(self):
        self.order.append("average")

    def evaluate(self, samples):
        if self.order[-1] != "evaluate":
            self.order.append("evaluate")
        labels = samples.labels[samples.labels != BROKEN]
        return float(labels.sum()), int((labels % 2).sum())


class Unsaved(Checkpoints):
    def save(self, progress, training):
        training.state()


def recipe(**values) -> Recipe:
    return digits_recipe(**{"batch": {"size": 4}, "epochs": 2, **values})


def samples(count: int) -> InMemory:
    return InMemory(samples=Samples(images=np.zeros((count, 1, 1, 1), np.float32), labels=np.arange(count)))


def run(tmp_path, recipe, *, comm=None, train=10, test=7, resume_from=0, asked=lambda trainer: None, source=samples):
    trainer = Recorder()
    comm = comm or SingleCommunicator("test")
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        # The shares of ranks that are not there never come.
        kind = Checkpoints if comm.size == 1 else Unsaved
        checkpoints = kind(tmp_path / "checkpoints", comm, events)
        Loop(
            recipe,
            comm,
            trainer,
            source(train),
            source(test),
            events,
            checkpoints=checkpoints,
            asked=lambda: asked(trainer),
        ).run(resume_from)
    return trainer, list(read_events(path))


def test_a_run_is_recorded(tmp_path):
    _, events = run(tmp_path, recipe())
    kinds = [event.event for event in events]
    assert kinds.count("checkpoint") == 2
    kinds = [kind for kind in kinds if kind not in ("checkpoint", "energy")]
    assert kinds == ["run", "step", "step", "overlap", "step", "epoch", "step", "step", "step", "epoch", "end"]
    begun = events[0]
    assert (begun.ranks, begun.epochs, begun.iterations_per_epoch, begun.parameters) == (1, 2, 3, 3)
    assert begun.backend == "single"
    steps = [event for event in events if event.event == "step"]
    assert [step.iteration for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step.epoch for step in steps] == [1, 1, 1, 2, 2, 2]
    assert [step.samples for step in steps] == [4, 4, 2, 4, 4, 2]
    assert all(step.communication_seconds == 0.25 for step in steps)
    assert all(0 <= step.data_seconds <= step.seconds for step in steps)
    for event in (event for event in events if event.event == "epoch"):
        # the mean over all samples, although the last batch is smaller
        assert event.train_loss == pytest.approx(np.arange(10).mean())
        assert event.test_loss == pytest.approx(3)
        assert event.test_accuracy == pytest.approx(3 / 7)
    assert events[-1].status == "done"


def test_energy_is_recorded_at_checkpoints_at_the_end_and_when_it_is_due(tmp_path, monkeypatch):
    zones = PowerZones(tmp_path, SERVER)
    meter = functools.partial(HostMeter, powercap=zones.root)
    monkeypatch.setattr(loop, "RunEnergy", functools.partial(energy_meter.RunEnergy, meter=meter))
    found = {}
    for seconds in (1e6, 0.0):
        monkeypatch.setattr(energy_meter, "_INTERVAL_SECONDS", seconds)
        (tmp_path / f"{seconds}").mkdir()
        _, events = run(tmp_path / f"{seconds}", recipe())
        found[seconds] = [event.iteration for event in events if event.event == "energy"]
    assert found == {1e6: [3, 6, 6], 0.0: [1, 2, 3, 3, 4, 5, 6, 6, 6]}


def test_micro_batches_cut_a_batch_and_keep_its_mean(tmp_path):
    trainer, events = run(tmp_path, recipe(batch={"size": 4, "micro_batch": 2}))
    assert [[len(part) for part in parts] for parts, _, _ in trainer.steps[:3]] == [[2, 2], [2, 2], [2]]
    assert [scale for _, scale, _ in trainer.steps[:3]] == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    (tmp_path / "whole").mkdir()
    whole = [event.loss for event in run(tmp_path / "whole", recipe())[1] if event.event == "step"]
    assert [event.loss for event in events if event.event == "step"] == pytest.approx(whole)


def test_a_batch_that_leaves_no_step_is_refused(tmp_path):
    with refused("HT-batch-too-large", batch=11, samples=10):
        run(tmp_path, recipe(batch={"size": 11, "drop_last": True}))


def test_the_rate_follows_the_schedule_step_by_step(tmp_path):
    trainer, events = run(tmp_path, recipe(schedule={"base_batch": 2, "warmup_epochs": 1}))
    rates = [0.1, 0.1 + 0.1 / 3, 0.1 + 0.2 / 3, 0.2, 0.2, 0.2]
    assert [rate for _, _, rate in trainer.steps] == pytest.approx(rates)
    assert [event.learning_rate for event in events if event.event == "step"] == pytest.approx(rates)


@pytest.mark.parametrize("stops", [[1], [2, 3], [3, 6], [1, 2, 3, 4, 5, 6]])
def test_stopped_and_resumed_runs_are_the_uninterrupted_one(tmp_path, stops):
    """Within an epoch, at its last step, at the last step of all, and one step an attempt."""
    (tmp_path / "whole").mkdir()
    whole, expected = run(tmp_path / "whole", recipe())
    resume_from, attempts = 0, tmp_path / "attempts"
    attempts.mkdir()
    for stop in [*stops, None]:
        steps = stop - resume_from if stop else None
        trainer, events = run(
            attempts,
            recipe(),
            resume_from=resume_from,
            asked=lambda trainer, steps=steps: "a signal" if len(trainer.steps) == steps else None,
        )
        resume_from = stop or 0
        last = events[-1]
        assert (last.event, getattr(last, "iteration", None), getattr(last, "reason", None)) == (
            ("stopped", stop, "a signal") if stop else ("end", None, None)
        )
    assert sum(trainer.trained, []) == sum(whole.trained, [])
    for kind, keys in (("step", ("iteration", "epoch", "loss", "learning_rate")), ("epoch", ("epoch", "train_loss"))):
        found, wanted = (
            [[getattr(event, key) for key in keys] for event in recorded if event.event == kind]
            for recorded in (events, expected)
        )
        assert found == wanted


def test_other_samples_are_not_resumed_with(tmp_path):
    run(tmp_path, recipe(), asked=lambda trainer: "a signal")
    with refused("HT-data-other-samples", path="digits"):
        run(tmp_path, recipe(), resume_from=1, train=11)


class Alone(SingleCommunicator):
    """One rank of several whose others contribute nothing to a sum."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("test")
        self.rank, self.size = rank, size

    def allreduce(self, array, reduction="mean"):
        return array / self.size if reduction == "mean" else array.copy()


def test_losses_and_evaluations_of_all_ranks_add_up_to_one_process(tmp_path):
    # the last batch has two samples for four ranks; the test set has three
    one = run(tmp_path, recipe(), test=3)[1]
    ranks = []
    for rank in range(4):
        (tmp_path / f"{rank}").mkdir()
        ranks.append(run(tmp_path / f"{rank}", recipe(), comm=Alone(rank, 4), test=3)[1])
    # Rank 0 alone writes checkpoints.
    one, *ranks = ([event for event in events if event.event != "checkpoint"] for events in (one, *ranks))
    for index, event in enumerate(one):
        for key in {"loss", "train_loss", "test_loss", "test_accuracy"} & event.model_fields_set:
            assert sum(getattr(events[index], key) for events in ranks) == pytest.approx(getattr(event, key))


def test_ranks_with_fewer_samples_than_others_have_parts_have_one_that_does_not_count(tmp_path):
    parts = []
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        trainer, _ = run(tmp_path / f"{rank}", recipe(batch={"size": 5, "micro_batch": 1}), comm=Alone(rank, 2))
        parts.append([parts for parts, _, _ in trainer.steps])
        assert [scale for _, scale, _ in trainer.steps] == [2 / 5] * 4
    assert [[len(part) for part in step] for step in parts[0]] == [[1, 1, 1]] * 4
    assert [step[2] for step in parts[1]] == [[BROKEN]] * 4
    seen = [label for rank in parts for step in rank[:2] for part in step for label in part if label != BROKEN]
    assert sorted(seen) == list(range(10))


def test_statistics_are_averaged_ahead_of_the_checkpoint_and_of_the_evaluation(tmp_path):
    def asked(trainer):
        return "a signal" if trainer.order.count("step") == 3 else None

    end = ["average", "save", "evaluate"]
    stopped, _ = run(tmp_path, recipe(), asked=asked)
    assert stopped.order == ["step"] * 3 + end[:2]
    resumed, _ = run(tmp_path, recipe(), resume_from=3)
    # Averaged again, of which no bits change, and not saved again.
    assert resumed.order == ["average", "evaluate"] + ["step"] * 3 + end
    (tmp_path / "within").mkdir()
    within, _ = run(tmp_path / "within", recipe(), asked=lambda trainer: "a signal")
    assert within.order == ["step", "save"]


def test_the_share_of_sgd_follows_the_transition(tmp_path):
    transition = {"center": 1.0, "period": 1.0, "rmsprop_rate": 0.01}
    settings = recipe(optimizer={"name": "rmsprop_to_sgd", "learning_rate": 0.1, "transition": transition})
    trainer, _ = run(tmp_path, settings)
    # Once an epoch, as Akiba et al. published it: exp(2 (e - 1)) / 2 with a period of 1 up to the centre.
    assert trainer.sgd_shares == pytest.approx([math.exp(-2) / 2] * 3 + [1 / 2] * 3)
    assert set(run(tmp_path, recipe())[0].sgd_shares) == {1.0}


class Slow(InMemory):
    """Each piece takes its time; every epoch comes upon another broken image."""

    def stream(self, pieces, epoch):
        self.broken.update({"first"} if epoch == 0 else {f"later {number:02}" for number in range(25)})
        for piece in pieces:
            time.sleep(0.02)
            yield self.samples[piece]


def test_waiting_for_samples_is_told_and_broken_images_once(tmp_path):
    settings = recipe(batch={"size": 4, "micro_batch": 2}, epochs=3)
    _, events = run(tmp_path, settings, source=lambda count: Slow(samples=samples(count).samples))
    steps = [event for event in events if event.event == "step"]
    assert all(step.seconds >= step.data_seconds >= 0.02 * -(-step.samples // 2) for step in steps)
    kinds = [event.event for event in events]
    assert [kinds[index - 1] for index, kind in enumerate(kinds) if kind == "broken_images"] == ["epoch", "epoch"]
    told = [event for event in events if event.event == "broken_images"]
    assert [(event.epoch, event.count) for event in told] == [(1, 1), (2, 25)]
    assert told[0].names == ("first",)
    assert told[1].names == tuple(f"later {number:02}" for number in range(20))
