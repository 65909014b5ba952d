"""A run's record has each step and epoch once, however often it was interrupted."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.events import Event
from hpctrain.report.console import Console
from hpctrain.report.record import Record

STEPS, EPOCHS = 3, 4
LAST = STEPS * EPOCHS


def attempt(number: int, begin: int, end: int, *, evaluated: bool, kept_every: int) -> list[Event]:
    """An attempt from a checkpoint that was cut off after step ``end``; ``by`` tells whose each event is."""
    events: list[Event] = [{"event": "start", "attempt": number, "iteration": begin}, {"event": "run"}]
    if begin and begin % STEPS == 0:
        events.append({"event": "epoch", "epoch": begin // STEPS, "by": number})
    for iteration in range(begin + 1, end + 1):
        events.append({"event": "step", "iteration": iteration, "by": number})
        if iteration % kept_every == 0:
            events.append({"event": "checkpoint", "iteration": iteration})
        if iteration % STEPS == 0 and (iteration < end or evaluated):
            events.append({"event": "epoch", "epoch": iteration // STEPS, "by": number})
    return [{"time": float(number), **event} for event in events]


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
    record = Record.of(events)
    assert [(step["iteration"], step["by"]) for step in record.steps] == sorted(by_step.items())
    assert [epoch["epoch"] for epoch in record.epochs] == [*range(1, EPOCHS + 1)]
    assert [event["iteration"] for event in record.checkpoints] == [*range(kept_every, LAST + 1, kept_every)]
    assert [each.start["attempt"] for each in record.attempts] == [*range(1, number + 2)]


def test_faults_and_end_are_those_of_the_last_attempt() -> None:
    first = attempt(1, 0, 2, evaluated=False, kept_every=1)
    fault: Event = {"time": 1.0, "event": "fault", "rank": 1, "host": "n2", "message": "killed"}
    end: Event = {"time": 1.0, "event": "end", "status": "resumable"}
    assert (Record.of([*first, fault, end]).faults, Record.of([*first, fault, end]).end) == ((fault,), end)
    record = Record.of([*first, fault, end, *attempt(2, 2, 3, evaluated=False, kept_every=1)])
    assert (record.faults, record.end, record.attempts[0].faults) == ((), {}, (fault,))


def test_what_the_console_says_of_a_resumed_run() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    console.show({"time": 1.0, "event": "start", "attempt": 3, "iteration": 12})
    console.show({"time": 1.0, "event": "checkpoint", "iteration": 14})
    console.show({"time": 1.0, "event": "stopped", "iteration": 14, "reason": "SIGUSR2"})
    console.show({"time": 1.0, "event": "start", "attempt": 4, "iteration": 0})
    assert err.getvalue().splitlines() == [
        "resumed at step 12 (attempt 3)",
        "checkpoint at step 14",
        "stopped after step 14: SIGUSR2",
        "begun again (attempt 4)",
    ]
