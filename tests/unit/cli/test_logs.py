"""The logs of a run are read in parts and merged, and each in place of which something else lies is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import logs
from hpctrain.cli.logs import RankLogs, merge, plain, prefixes
from hpctrain.common.run.directory import RunDirectory
from support.refusals import refused

# Few different lines, so that they repeat and the orders of the ranks contradict each other.
LINES = st.lists(st.sampled_from(["", "a", "b", "c", "d"]), max_size=12)


def test_long_logs_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 2**18)
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    own = [f"line {number}" for number in range(50_000)]
    for rank in (0, 1):
        directory.log(rank).write_text("\n".join(own))
    reader = RankLogs(directory, None, 2)
    parts = []
    while part := list(reader.lines(last=True)):
        parts.append(part)
    assert len(parts) > 2
    assert [line for part in parts for line in part] == [f"[0-1] {line}" for line in own]


def test_a_log_that_is_none(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    os.mkfifo(directory.log(1))
    with refused("HT-file-unreadable", path=directory.log(1)):
        list(RankLogs(directory, None, 2).lines(last=True))
    assert list(RankLogs(directory, frozenset({0}), 2).lines(last=True)) == []
    assert list(RankLogs(directory, frozenset({0}), 2**70).lines(last=True)) == []
    assert RankLogs(directory, None, 2**70)


def test_a_hole_in_the_events_is_not_read_to_its_end(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    directory.log(0).write_text("one\n")
    with directory.events.open("wb") as events:
        # Which takes no room on the disk, and hours to read.
        events.truncate(2**42)
    reader = RankLogs(directory, None, 1, epochs=True)
    assert [list(reader.lines(last=True)) for _ in range(2)] == [["one"], []]


def test_what_is_written_while_it_is_read_does_not_count(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    directory.log(0).write_text("one\n")
    reader = RankLogs(directory, None, 1)
    printed = []
    while part := list(reader.lines(last=True)):
        printed += part
        with directory.log(0).open("a") as log:
            log.write("more\n")
    assert printed == ["one"]


@given(st.dictionaries(st.integers(0, 20), LINES, max_size=6))
def test_every_line_of_every_rank_once_and_in_the_order_of_the_lowest(lines: dict[int, list[str]]) -> None:
    merged = list(merge(lines))
    for rank, own in lines.items():
        shown = [line for ranks, line in merged if rank in ranks]
        assert sorted(shown) == sorted(own)
        assert rank != min(lines) or shown == own
    assert all(list(ranks) == sorted(set(ranks)) for ranks, _ in merged)


@given(LINES, st.integers(1, 8))
def test_identical_logs_give_one_line_each(own: list[str], ranks: int) -> None:
    assert list(merge(dict.fromkeys(range(ranks), own))) == [(tuple(range(ranks)), line) for line in own]


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.uuids()), max_size=12))
def test_logs_that_do_not_contradict_each_other_are_merged_as_far_as_can_be(
    said: list[tuple[set[int], object]],
) -> None:
    lines = {rank: [str(line) for ranks, line in said if rank in ranks] for rank in range(4)}
    assert sorted(merge(lines)) == sorted((tuple(sorted(ranks)), str(line)) for ranks, line in said)


def test_prefixes_fold_the_ranks() -> None:
    prefix = prefixes(range(8))
    assert prefix((0, 1, 2, 5)) == "[0-2,5] "
    assert prefix((7,)) == "[7] "
    assert prefixes({3})((3,)) == ""


def test_a_line_cannot_play_with_the_terminal() -> None:
    assert plain("\x1b[1;31mred\x1b[0m\tplain") == "red\tplain"
    assert plain("\x1b[2J\x1b]0;title\x07gone") == "\\u001b[2J\\u001b]0;title\\u0007gone"
    text = "2J Größe ✓"
    assert plain(f"\x9b{text}") == f"\\u009b{text}"


def test_a_log_without_a_line_is_read_to_its_end(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    directory.log(0).write_text("one\n")
    directory.log(1).touch()
    reader = RankLogs(directory, None, 2)
    assert [*reader.lines(last=True), *reader.lines(last=True)] == ["[0] one"]
    directory.log(2).write_text("longer than it will be")
    reader = RankLogs(directory, frozenset({2}), 3)
    assert list(reader.lines(last=False)) == []
    directory.log(2).write_text("short")
    assert list(reader.lines(last=True)) == ["longer than it will be"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\r1/3 #\r2/3 ##\r3/3 ###", "3/3 ###"),
        ("1/3 loss\b\b\b\r3/3 loss\b\b\r", "3/3 loss"),
        ("\r", ""),
        ("a b", "a b"),
    ],
)
def test_the_last_state_of_a_progress_bar_is_shown(written: str, shown: str) -> None:
    assert plain(written) == shown
