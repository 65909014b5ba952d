"""A run's events are shown as they appear."""

from __future__ import annotations

import errno
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import line_of, read_events
from hpctrain.common.run.events.kinds import EndEvent, StoppedEvent
from hpctrain.control.supervision import follow
from hpctrain.control.supervision.audience import Audience
from hpctrain.control.supervision.follow import Follower, Tail
from support.refusals import refused


def test_a_line_that_is_no_event_is_named_once_and_passed_over(tmp_path):
    directory = RunDirectory(tmp_path)
    line = line_of(EndEvent(status="resumable"))
    directory.events.write_bytes(line * 2)
    shown = []
    said = []
    follower = Follower(directory, Audience(show=shown.append, notice=said.append))
    with directory.events.open("ab") as file:
        file.write(line_of(StoppedEvent(iteration=3, reason="SIGTERM")))
    follower.advance()
    assert [event.event for event in shown] == ["stopped"]
    with directory.events.open("ab") as file:
        file.write(line + b'{"time": 1, "event": "stopped", "iteration": -1, "reason": ""}\nnonsense\n' + line)
    follower.advance()
    assert [event.event for event in shown] == ["stopped", "end", "end"]
    (warning,) = said
    assert "events.jsonl: " in warning and "'stopped'" in warning and "= -1: " in warning


def failing_once(monkeypatch, name):
    """A file server that has just lost the handle of a file: the first opening fails."""
    tries = []

    def open_once(path, *arguments):
        if Path(path).name == name and not tries:
            tries.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return os_open(path, *arguments)

    os_open = os.open
    monkeypatch.setattr("hpctrain.common.files.regular.os.open", open_once)
    return tries


@pytest.mark.parametrize("name", ["events.jsonl", "rank-0.log"])
@pytest.mark.parametrize("last", [False, True])
def test_what_cannot_be_read_now_is_read_later(tmp_path, monkeypatch, name, last):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    shown, lines, said = [], [], []
    follower = Follower(directory, Audience(show=shown.append, output=lines.append, notice=said.append))
    directory.events.write_bytes(line_of(EndEvent(status="done")))
    directory.log(0).write_bytes(b"one\ntwo\n")
    tries = failing_once(monkeypatch, name)
    follower.advance(last=last)
    if not last:
        follower.advance()
    assert tries and ([event.event for event in shown], lines, len(said)) == (["end"], ["one\ntwo\n"], 1)


def test_a_file_that_was_emptied_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    tail = Tail(path, whole=True)
    assert tail.lines() == [b"one", b"two"]
    os.truncate(path, 8)  # an attempt that goes on takes an incomplete line away
    with path.open("ab") as file:
        file.write(b"four\n")
    assert tail.lines() == [b"four"]
    path.write_bytes(b"five\n")
    assert tail.lines() == [b"five"]


def test_a_line_without_an_end_is_passed_on_in_parts_and_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "LONGEST_LINE", 1000)
    path = tmp_path / "log"
    tail = Tail(path)
    got, written = b"", b""
    for number in range(200):
        part = b"%d " % number * 30
        written += part
        with path.open("ab") as file:
            file.write(part)
        got += b"".join(tail.lines())
        assert written.startswith(got) and len(written) - len(got) <= 1000


@given(st.lists(st.text("a\n\r", max_size=40).map(str.encode)))
def test_lines_are_those_of_the_file_however_it_grows(parts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        tail, got = Tail(path), []
        for part in [*parts, b"\n"]:
            with path.open("ab") as file:
                file.write(part)
            got += tail.lines()
    assert got == b"".join([*parts, b"\n"]).splitlines()


def test_a_long_file_in_place_of_the_events_is_not_kept_in_memory(tmp_path):
    directory = RunDirectory(tmp_path)
    shown, said = [], []
    follower = Follower(directory, Audience(show=shown.append, notice=said.append))
    directory.events.write_bytes(b"")
    os.truncate(directory.events, 2**27)
    with directory.events.open("ab") as file:
        file.write(b"\n" + line_of(EndEvent(status="done")))
    tracemalloc.start()
    try:
        follower.advance(last=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2**26 + 2**24
    assert ([event.event for event in shown], len(said)) == (["end"], 1)


@pytest.mark.parametrize("make", ["pipe", "link", "folder"])
def test_something_else_in_place_of_the_events_is_not_waited_for(tmp_path, make):
    directory = RunDirectory(tmp_path)
    match make:
        case "pipe":
            os.mkfifo(directory.events)
        case "link":
            directory.events.symlink_to("/dev/zero")
        case "folder":
            directory.events.mkdir()
    said = []
    Follower(directory, Audience(notice=said.append)).advance()
    assert len(said) == 1 and str(directory.events) in said[0]
    with refused("HT-file-unreadable"):
        list(read_events(directory.events))
