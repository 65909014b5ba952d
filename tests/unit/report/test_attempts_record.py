"""A run's record has each step and epoch once, however often it was interrupted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import (
    CheckpointEvent,
    EndEvent,
    EpochEvent,
    FaultEvent,
    RunEvent,
    StartEvent,
    StepEvent,
)
from hpctrain.report.record import of_kind
from support.report.written_runs import record_of

STEPS, EPOCHS = 3, 4
LAST = STEPS * EPOCHS


def attempt(number: int, begin: int, end: int, *, evaluated: bool, kept_every: int) -> list[Event]:
    """An attempt from a checkpoint that was cut off after step ``end``; the time tells whose each event is."""

    def epoch(done: int) -> EpochEvent:
        return EpochEvent(time=number, epoch=done // STEPS, samples_per_s=1.0, train_loss=1.0, test_accuracy=0.5)

    run = dict.fromkeys(("recipe", "framework", "epochs", "iterations_per_epoch", "parameters"))
    step = dict.fromkeys(("epoch", "loss", "learning_rate", "samples", "communication_seconds"))
    events: list[Event] = [
        StartEvent(time=number, attempt=number, iteration=begin),
        RunEvent(time=number, backend="mpi", ranks=2, **run),
    ]
    if begin and begin % STEPS == 0:
        events.append(epoch(begin))
    for iteration in range(begin + 1, end + 1):
        events.append(StepEvent(time=number, iteration=iteration, seconds=1.0, **step))
        if iteration % kept_every == 0:
            events.append(CheckpointEvent(time=number, iteration=iteration))
        if iteration % STEPS == 0 and (iteration < end or evaluated):
            events.append(epoch(iteration))
    return events


@given(
    st.lists(st.tuples(st.integers(0, LAST), st.booleans(), st.integers(0, LAST)), max_size=6), st.integers(1, STEPS)
)
def test_each_step_once(cuts: list[tuple[int, bool, int]], kept_every: int) -> None:
    """Any attempts: each begins at any checkpoint that there may be, and ends anywhere."""
    events: list[Event] = []
    begin, by_step = 0, {}
    number = 0
    for number, (length, evaluated, older) in enumerate(cuts, start=1):
        end = min(begin + length, LAST)
        events += attempt(number, begin, end, evaluated=evaluated, kept_every=kept_every)
        by_step.update(dict.fromkeys(range(begin + 1, end + 1), number))
        begin = max(0, (end - older % STEPS) // kept_every * kept_every)
    events += attempt(number + 1, begin, LAST, evaluated=True, kept_every=kept_every)
    by_step.update(dict.fromkeys(range(begin + 1, LAST + 1), number + 1))
    record = record_of(events)
    assert [(step.iteration, step.time) for step in record if step.event == "step"] == sorted(by_step.items())
    assert [epoch.epoch for epoch in record.epochs] == [*range(1, EPOCHS + 1)]
    assert [event.iteration for event in of_kind(record.events, CheckpointEvent)] == [
        *range(kept_every, LAST + 1, kept_every)
    ]
    assert [each.start.attempt for each in record.attempts] == [*range(1, number + 2)]


def test_faults_and_end_are_those_of_the_last_attempt() -> None:
    first = attempt(1, 0, 2, evaluated=False, kept_every=1)
    fault = FaultEvent(rank=1, host="n2", message="killed")
    end = EndEvent(status="resumable")
    assert (record_of([*first, fault, end]).faults, record_of([*first, fault, end]).end) == ((fault,), end)
    record = record_of([*first, fault, end, *attempt(2, 2, 3, evaluated=False, kept_every=1)])
    assert (record.faults, record.end, record.attempts[0].faults) == ((), None, (fault,))
