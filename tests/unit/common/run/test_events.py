"""Events survive a crash, and a reader is told what is wrong with a file."""

from __future__ import annotations

import json
import resource

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events import EventWriter, line_of, parse_event, read_events
from hpctrain.common.run.events.kinds import (
    EndEvent,
    OtherEvent,
    StartEvent,
    StepEvent,
)
from support.refusals import refused


def step(iteration: int) -> StepEvent:
    numbers = dict.fromkeys(("loss", "learning_rate", "seconds", "communication_seconds"), 0.5)
    return StepEvent(iteration=iteration, epoch=1, samples=2, **numbers)


def test_a_line_cut_short_by_a_crash_is_dropped_by_readers_and_by_the_next_writer(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as events:
        events.emit(step(1))
    with path.open("ab") as file:
        file.write(b'{"time": 1.0, "event": "st')
    assert [event.iteration for event in read_events(path)] == [1]
    with EventWriter(path) as events:
        events.emit(step(2))
    assert [event.iteration for event in read_events(path)] == [1, 2]


def test_a_disk_that_fills_up_within_a_line_leaves_no_part_of_it(tmp_path):
    path = tmp_path / "events.jsonl"
    first, lost, later = (step(number) for number in (1, 2, 3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventWriter(path) as events:
        events.emit(first)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(HpctrainError):
                events.emit(lost)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        events.emit(later)
    assert list(read_events(path)) == [first, later]


def test_zeros_that_a_crash_of_the_machine_left_are_dropped(tmp_path):
    path = tmp_path / "events.jsonl"
    for damage in (b"\0" * 40, b'{"time": 1.0, \0\0\0\0\n'):
        path.write_bytes(line_of(step(1)) + damage)
        assert [event.iteration for event in read_events(path)] == [1]
        with EventWriter(path) as events:
            events.emit(step(2))
        assert [event.iteration for event in read_events(path)] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        json.dumps({"event": "step"}),
        '{"time": 1, "event": []}',
        "\xff",
        "[" * 100_000,
        "9" * 10_000,
        '{"time": 1.0, "event": "log", "iteration": 1, "values": {"loss\\udcff": 1.0}}',
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "event": "mark"}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(HpctrainError) as caught:
        list(read_events(path))
    assert caught.value.code == "HT-event-invalid"
    assert caught.value.values["where"] == f"{path}:2"


@pytest.mark.parametrize("kind", ["changed", "fault", "of another version"])
def test_what_could_not_be_shown_is_refused(kind):
    value = "[" * 600 + "]" * 600
    line = (
        f'{{"time": 1, "event": "{kind}", "differences": {{"a": [{value}, 1]}}, "rank": 1, "host": "n", "message": ""}}'
    )
    with refused("HT-event-invalid", where="a line"):
        parse_event(line.encode(), "a line")


def test_of_a_text_that_is_no_sentence_the_beginning_is_read(tmp_path):
    line = f'{{"time": 1, "event": "fault", "rank": 1, "host": "n", "message": "{"x" * 10**6}"}}'
    event = parse_event(line.encode(), "a line")
    assert len(event.message) <= 4000 and event.message.startswith("xx")
    # Written again, it is the same.
    assert parse_event(line_of(event), "a line") == event


def test_a_kind_of_a_later_version_is_passed_on(tmp_path):
    path = tmp_path / "events.jsonl"
    line = b'{"time": 1.0, "event": "later", "values": [1, {"a": null}]}\n'
    path.write_bytes(line)
    (event,) = read_events(path)
    assert isinstance(event, OtherEvent) and event.event == "later"
    assert line_of(event) == line


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with refused("HT-file-unwritable", reason="File name too long") as caught:
        EventWriter(tmp_path / ("n" * 300))
    assert caught.value.exit_code == 2


def test_a_new_writer_goes_on_where_the_dead_one_was(tmp_path):
    """Both emit the same; the dead one had an attempt before, wrote up to step 4, and half of step 5."""
    path = tmp_path / "events.jsonl"
    heir = EventWriter(None)
    with EventWriter(path) as dead:
        for iteration in range(1, 8):
            dead.emit(step(iteration))
        dead.emit(StartEvent(attempt=2, iteration=2))
        for iteration in range(3, 7):
            heir.emit(step(iteration))
            if iteration < 5:
                dead.emit(step(iteration))
    with path.open("ab") as file:
        file.write(b'{"time": 1, "event": "st')
    heir.take_over(path)
    with heir:
        # Of step 4, which is there; and step 7, which is there in the attempt before only.
        for iteration in (4, 7):
            heir.emit(step(iteration))
        heir.take_over(path)
    events = list(read_events(path))
    begin = [event.event for event in events].index("start")
    assert [event.iteration for event in events[begin + 1 :]] == [3, 4, 5, 6, 7]


def test_a_new_writer_passes_over_kinds_of_later_versions(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(line_of(step(1)) + b'{"time": 1.0, "event": "later", "iteration": [2]}\n')
    heir = EventWriter(None)
    heir.emit(step(1))
    heir.emit(step(2))
    heir.take_over(path)
    with heir:
        assert [event.event for event in read_events(path)] == ["step", "later", "step"]


@pytest.mark.parametrize("length", [1, 2**16, 3 * 2**16])
def test_a_partial_line_of_any_length_is_dropped(tmp_path, length):
    path = tmp_path / "events.jsonl"
    whole = line_of(EndEvent(status="done")) * 3
    path.write_bytes(whole + b"x" * length)
    EventWriter(path).__exit__(None, None, None)
    assert path.read_bytes() == whole


def test_one_of_several_writers_leaves_a_partial_line_alone(tmp_path):
    """It may be the other one's, who is about to end it."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time": 1.0, "event": "mark"}\n{"time": 1.0, "ev')
    EventWriter(path, alone=False).__exit__(None, None, None)
    assert path.read_bytes().endswith(b'"ev')
