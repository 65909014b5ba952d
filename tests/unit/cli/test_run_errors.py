"""What stderr has of a run that failed: each error once, and all that was written before a hard death."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.control.supervision.failure import Failure
from hpctrain.report.console import Console
from support.launching import AS_ROOT
from support.refusals import codes

LOG = Path("logs/rank-1.log")


def stderr_of(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "hpctrain", "run", "script.py", "-np", "1"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **AS_ROOT}, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("import decimal; decimal.Decimal('odd')", "ConversionSyntax", "HT-rank-exception"),
        ("import sys; sys.exit('no data here')", "no data here", "HT-rank-exit"),
        ("import sys; sys.exit(7)", "exit status 7", "HT-rank-exit"),
        ("import hpctrain; raise hpctrain.HpctrainError('HT-of-test', 'seen?', 'do it')", "seen?", "HT-of-test"),
        ("import sys; sys.stderr = None; raise ValueError('of nobody')", "of nobody", "HT-rank-exception"),
        ("import sys; sys.stderr.close(); raise ValueError('of nobody')", "of nobody", "HT-rank-exception"),
    ],
)
def test_an_error_is_printed_once(tmp_path: Path, text: str, words: str, code: str) -> None:
    printed = stderr_of(tmp_path, text)
    assert printed.count(words) == 1, printed
    assert codes(printed) == [code]
    assert "rank-0.log" in printed


def test_what_was_written_before_a_hard_death_is_shown(tmp_path: Path) -> None:
    printed = stderr_of(
        tmp_path,
        "import os, sys\nsys.stderr.write('no end of the li')\nsys.stderr.write('ne')\nos.kill(os.getpid(), 9)",
    )
    assert "no end of the line" in printed
    assert codes(printed) == ["HT-rank-killed"]


def shown(text: str, printed: str) -> bool:
    console = Console(io.StringIO(), io.StringIO())
    console.errors(text)
    return console.has_shown(printed)


def test_words_are_seen_only_where_a_rank_wrote_these_very_lines() -> None:
    printed = "ValueError: a: b\n  c"
    for text in (f"Traceback\n{printed}\n", "of.a.module.ValueError: a: b\r\n  c\n", f"\x1b[1mx\n{printed}"):
        assert shown(text, printed)
    for text in ("", "ValueError: a: b\n", "said ValueError: a: b\n  c", "ValueError: a: b and\n  c", "x" * 2**17):
        assert not shown(text, printed)
    assert not shown(f"{printed}\n" + "x" * 2**17, printed)


def test_another_ranks_error_is_told_unless_rank_0_had_the_same() -> None:
    failure = Failure(
        code="HT-rank-exception",
        message="rank 1 on n failed: ValueError: b; changed",
        rank=1,
        log=LOG,
        lines=("ValueError: b",),
        words="ValueError: b",
        printed="ValueError: b",
        hint="do it",
    )
    told = failure.without_log_of(shown=0)
    assert told.count("ValueError: b") == 2 and "rank 1" in told and "changed" in told
    again = replace(failure, shown=True).without_log_of(shown=0)
    assert "ValueError" not in again
    assert [each for each in ("rank 1", str(LOG), "changed", "do it", "[HT-rank-exception]") if each not in again] == []
