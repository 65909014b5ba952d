"""What a run that failed shows: each error with its code, and all that was written before a hard death."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import AS_ROOT
from support.refusals import codes


def printed_by(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "hpctrain", "run", "script.py", "-np", "1"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **AS_ROOT}, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("import decimal; decimal.Decimal('odd')", "ConversionSyntax", "HT-rank-exception"),
        ("import sys; sys.exit('no data here')", "no data here", "HT-rank-exit"),
        ("import hpctrain; raise hpctrain.HpctrainError('HT-of-test', 'seen?', 'do it')", "seen?", "HT-of-test"),
    ],
)
def test_an_error_is_printed_with_its_code(tmp_path: Path, text: str, words: str, code: str) -> None:
    printed = printed_by(tmp_path, text)
    assert words in printed
    assert {*codes(printed)} == {code}
    assert "rank-0.log" in printed


def test_what_was_written_before_a_hard_death_is_shown(tmp_path: Path) -> None:
    printed = printed_by(
        tmp_path,
        "import os, sys\nsys.stderr.write('no end of the li')\nsys.stderr.write('ne')\nos.kill(os.getpid(), 9)",
    )
    assert "no end of the line" in printed
    assert codes(printed) == ["HT-rank-killed"]
