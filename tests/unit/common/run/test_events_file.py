"""Long files of events: what is not parsed, and which events count."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, kept, line_of, parse_event, read_events
from hpctrain.common.run.events.kinds import (
    CheckpointEvent,
    ContinuedEvent,
    EnergyEvent,
    EpochEvent,
    LogEvent,
    RunEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.common.run.events.reader import class_of
from hpctrain.report.record import Record
from support.refusals import refused


def step(iteration: int, **values: Any) -> StepEvent:
    given = {"epoch": 1 + (iteration - 1) // 10, "loss": 0.5, "learning_rate": 0.1, "samples": 8, "seconds": 0.25}
    return StepEvent(time=float(iteration), iteration=iteration, **{**given, "communication_seconds": 0.1, **values})


def run(recipe: str | None = "digits") -> RunEvent:
    counts = {"epochs": 9, "iterations_per_epoch": 10} if recipe else {"epochs": None, "iterations_per_epoch": None}
    return RunEvent(recipe=recipe, framework="torch", backend="mpi", ranks=2, parameters=1, **counts)


def epoch(number: int) -> EpochEvent:
    return EpochEvent(epoch=number, samples_per_s=1.0, train_loss=1.0, test_accuracy=0.5)


def steps_of_a_run(count: int) -> Iterator[Event]:
    """An epoch ends every ten steps, with a checkpoint."""
    yield StartEvent(attempt=1, iteration=0)
    yield run()
    for iteration in range(1, count + 1):
        yield step(iteration)
        if iteration % 10 == 0:
            yield CheckpointEvent(iteration=iteration)
            yield epoch(iteration // 10)


def write(path: Path, events: Sequence[Event]) -> Path:
    path.write_bytes(b"".join(map(line_of, events)))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "events.jsonl", [*steps_of_a_run(257)])


def contents(path: Path) -> tuple[list[Event], list[Event], list[StepEvent], Event | None]:
    file = EventsFile(path)
    return [*file], file.outline, file.newest(StepEvent), file.last()


def expected(path: Path) -> tuple[list[Event], list[Event], list[Event], Event | None]:
    """The same, of all events parsed."""
    events = [*read_events(path)]
    outline: list[Event] = []
    last, begin = None, 0
    for number, event in enumerate(events):
        if isinstance(event, StepEvent):
            last = event
        elif not isinstance(event, LogEvent):
            if isinstance(event, StartEvent):
                last, begin = None, number
            if isinstance(event, EpochEvent) and last:
                outline.append(last)
            outline.append(event)
    newest = [event for event in events if isinstance(event, StepEvent)][-100:]
    own = [event for event in events[begin:] if isinstance(event, StepEvent)][-100:]
    return events, outline, newest if len(newest) == len(own) else own, events[-1] if events else None


def test_what_is_not_parsed_is_as_if_it_were(path: Path) -> None:
    assert contents(path) == expected(path)
    with path.open("ab") as file:
        for event in (StartEvent(attempt=2, iteration=240), *map(step, range(241, 300)), epoch(24)):
            file.write(line_of(event))
        # A line that is not whole is none.
        file.write(line_of(step(300))[:40])
    assert contents(path) == expected(path)
    assert EventsFile(path).lines == len([*read_events(path)])


@pytest.mark.parametrize("keys", [["event", "time"], ["iteration", "event", "time"]])
def test_lines_of_other_writers(path: Path, keys: list[str]) -> None:
    records = [event.record() for event in steps_of_a_run(60)]
    path.write_text(
        "".join(
            json.dumps({**{key: record[key] for key in keys if key in record}, **record}, separators=(",", ":")) + "\n"
            for record in records
        )
    )
    assert contents(path) == expected(path)
    assert len(EventsFile(path).newest(StepEvent)) == 60


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 1.0, "event": "step", "iter{"time": 2.0, "event": "checkpoint", "iteration": 3}\n',
        b"no event\n",
    ],
)
def test_lines_that_hide_an_event_are_refused(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], line, *lines[5:]]))
    with pytest.raises(HpctrainError) as caught:
        [*EventsFile(path)]
    assert caught.value.code == "HT-event-invalid"
    assert caught.value.values["where"] == f"{path}:6"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**70), st.floats(), st.text(max_size=3), st.just([1]), st.just({"a": 1})
)


@given(
    st.sampled_from(
        [step(3), LogEvent(iteration=1, values={"a": 1.0, "event": 2.0}), epoch(2), EnergyEvent(iteration=1, hosts={})]
    ),
    st.data(),
)
def test_lines_are_parsed_as_the_models_say(event: Event, data: st.DataObject) -> None:
    """Whichever way: by pydantic from the text, or from what Python's json makes of it."""
    record = event.record()
    for key in data.draw(st.sets(st.sampled_from(sorted(record.keys() - {"event"})), max_size=2)):
        record[key] = data.draw(VALUES)
    line = json.dumps(record).encode()
    # A key that is there twice has its last value.
    if data.draw(st.booleans()):
        line = line[:-1] + b', "iteration": 77}'
    values = json.loads(line)
    try:
        wanted = class_of(values).model_validate(values)
    except ValidationError:
        with refused("HT-event-invalid", where="here"):
            parse_event(line, "here")
    else:
        found = parse_event(line, "here")
        assert type(found) is type(wanted) and repr(found) == repr(wanted)


EVENTS = st.one_of(
    st.builds(lambda iteration: StartEvent(attempt=1, iteration=iteration), st.integers(0, 6)),
    st.builds(step, st.integers(1, 8)),
    st.builds(lambda iteration: LogEvent(iteration=iteration, values={"a": 1.0}), st.integers(1, 8)),
    st.builds(lambda iteration: StoppedEvent(iteration=iteration, reason="asked"), st.integers(1, 8)),
    st.builds(lambda iteration: ContinuedEvent(iteration=iteration), st.integers(0, 6)),
    st.builds(lambda iteration: CheckpointEvent(iteration=iteration), st.integers(1, 8)),
    st.builds(epoch, st.integers(1, 3)),
    st.builds(run, st.sampled_from([None, "digits"])),
)


@given(st.lists(EVENTS, max_size=30))
def test_kept_is_what_no_later_start_undoes(events: list[Event]) -> None:
    """By definition: each event against each later start, up to where a script has saved its state.

    Where a script says where it goes on, what went before since it last said so was that start, also what it had saved.
    """
    wanted = []
    done, told, script = 0, -1, False
    starts: dict[int, int | None] = {}
    for number, event in enumerate(events):
        script = event.recipe is None if isinstance(event, RunEvent) else script
        if isinstance(event, StartEvent):
            starts[number] = event.iteration
        if isinstance(event, StoppedEvent) and (
            script or not any(isinstance(each, RunEvent) for each in events[:number])
        ):
            starts[number] = None
        if isinstance(event, ContinuedEvent):
            starts |= dict.fromkeys((place for place in starts if place > told), event.iteration)
            told = number
    for number, event in enumerate(events):
        if isinstance(event, StartEvent | StepEvent | ContinuedEvent):
            done = event.iteration
        needed = event.last_step_needed(done) - (isinstance(event, LogEvent) and told >= 0)
        later = [starts[place] for place in starts if place >= number + isinstance(event, StartEvent)]
        limits = later[: later.index(None)] if None in later else later
        if all(needed <= limit for limit in limits):
            wanted.append(event)
        if number in starts and not isinstance(event, StartEvent):
            done = 0
    assert [*kept(events)] == wanted


def test_a_record_of_a_long_run_is_small(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    path = write(directory.events, [StartEvent(attempt=1, iteration=0), run(), *map(step, range(1, 20_001))])
    tracemalloc.start()
    try:
        record = Record(directory)
        assert record.sums.totals.count == 20_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.sums.totals.count == 20_000 and record.sums.totals.samples == 160_000
    assert record.sums.timed.seconds == 0.25 * 19_999
    # As models they have 20 MB; 8 bytes each are for the median.
    assert peak < 2e6 < path.stat().st_size
