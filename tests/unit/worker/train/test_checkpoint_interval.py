"""The interval of checkpoints against the exact model of failures, and who decides it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from unit.worker.train.test_loop import Recorder, recipe, samples

from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import EndEvent, FaultEvent, StartEvent, StoppedEvent
from hpctrain.worker.train.checkpoint_interval import CheckpointInterval, failures_seen, interval_seconds
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.loop import Loop
from support.thread_ranks import on_ranks

HOUR = 3600.0


@pytest.mark.parametrize("cost, mtbf", [(0.05, 24 * HOUR), (2.0, 6 * HOUR), (30.0, HOUR), (10.0, 7 * 24 * HOUR)])
def test_the_interval_loses_the_least_time_under_exponential_failures(cost, mtbf):
    """The exact expected time for a second of work, by Daly 2006: M (e^((t + C) / M) - 1) / t."""

    def lost(interval):
        return mtbf * np.expm1((interval + cost) / mtbf) / interval - 1

    chosen = interval_seconds(cost, mtbf)
    assert chosen == pytest.approx(math.sqrt(2 * cost * mtbf))
    least = lost(np.geomspace(cost, mtbf, 100_000)).min()
    assert least <= lost(chosen) <= 1.01 * least


@pytest.mark.parametrize(
    "cost, mtbf, written, seconds",
    [
        # Not more than a tenth of the time is spent writing.
        (0.0, HOUR, 7.0, 70.0),
        (2.0, HOUR, 7.0, 120.0),
        # A save that costs more than half the time between failures.
        (HOUR, HOUR, 0.0, HOUR),
    ],
)
def test_the_interval_is_bounded(cost, mtbf, written, seconds):
    assert interval_seconds(cost, mtbf, written) == pytest.approx(seconds)


def test_attempts_that_did_not_stop_in_good_order_are_failures():
    def start(time, attempt):
        return StartEvent(time=time, attempt=attempt, iteration=0)

    fault = FaultEvent(time=50.0, rank=None, host=None, message="a host was lost")
    stop = StoppedEvent(time=170.0, iteration=3, reason="USR2")
    events = [start(10.0, 1), fault, start(100.0, 2), stop, EndEvent(time=171.0, status="resumable"), start(200.0, 3)]
    assert failures_seen([]) == (0, 0.0)
    assert failures_seen(events[:1]) == (0, 0.0)
    assert failures_seen(events) == (1, 40.0 + 71.0)
    # The clock was set back within the first attempt.
    events[1] = FaultEvent(time=5.0, rank=None, host=None, message="a host was lost")
    assert failures_seen(events) == (1, 71.0)


def test_the_choice_follows_what_was_measured():
    now = [0.0]
    interval = CheckpointInterval(failures=2, worked=7190.0, clock=lambda: now[0])
    now[0] = 59.0
    assert not interval.due
    now[0] = 60.0
    assert interval.due
    interval.saved()
    assert not interval.due
    now[0] = 70.0
    # 7,260 s with two failures.
    chosen = interval.measured(0.5, 1.0)
    assert chosen == {"interval_seconds": pytest.approx(math.sqrt(2 * 0.5 * 3630)), "mtbf_seconds": 3630.0}
    now[0] = 60.0 + 60.2
    assert not interval.due
    now[0] = 60.0 + 60.3
    assert interval.due
    # The mean of both costs.
    assert interval.measured(1.5, 1.0)["interval_seconds"] == pytest.approx(math.sqrt(2 * 1.0 * 7310.3 / 2))
    assert CheckpointInterval(mtbf=HOUR, failures=2, worked=10.0).measured(0.5, 1.0)["mtbf_seconds"] == HOUR
    assert CheckpointInterval().measured(0.5, 1.0)["mtbf_seconds"] == 24 * HOUR


class OneMinute(CheckpointInterval):
    def measured(self, *_):
        return {"interval_seconds": 60.0}


def test_rank_0s_clock_decides_for_all_ranks(tmp_path):
    def train(comm):
        trainer = Recorder()
        # A step takes half a minute on rank 0; the other's clock stands, or runs as fast as it likes.
        clocks = [lambda: 30.0 * len(trainer.steps), lambda: math.inf, lambda: 0.0]
        path = tmp_path / f"{comm.rank}.jsonl"
        with EventWriter(path) as events:
            interval = OneMinute(clock=clocks[comm.rank])
            checkpoints = Checkpoints(tmp_path / "checkpoints", comm, events, interval=interval)
            settings = recipe(checkpoints={"every_steps": "auto"})
            train, test = samples(16), samples(4)
            Loop(settings, comm, trainer, train, test, events, checkpoints=checkpoints).run()
        return [event.iteration for event in read_events(path) if event.event == "checkpoint"], trainer.order

    (saved, order), *others = on_ranks(3, train)
    # Four steps an epoch: after a minute, at the end of the epoch, and the same again.
    assert saved == [2, 4, 6, 8]
    assert all(other == order for _, other in others)
