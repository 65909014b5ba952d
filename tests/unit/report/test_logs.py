"""The logs of a run are read in parts, and each in place of which something else lies is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.report import logs
from hpctrain.report.logs import RankLogs


def test_long_logs_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 2**21)
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    own = [f"line {number}" for number in range(400_000)]
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
    with pytest.raises(HpctrainError, match=r"rank-1\.log"):
        list(RankLogs(directory, None, 2).lines(last=True))
    assert list(RankLogs(directory, frozenset({0}), 2).lines(last=True)) == []


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
