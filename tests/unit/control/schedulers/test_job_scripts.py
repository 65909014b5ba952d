"""The job scripts, against files that a person can read.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/control/schedulers/test_job_scripts.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.schedulers.job_scripts import CASES

GOLDEN = Path(__file__).parents[3] / "golden" / "jobs"


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("REGENERATE"):
        path.write_text(CASES[name])
    assert CASES[name] == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=CASES[name], text=True, check=True)


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: apt-get install shellcheck")
    # SC2016: a $ within single quotes, which is how values are quoted.
    found = subprocess.run(["shellcheck", "--exclude=SC2016", "-"], input=CASES[name], text=True, capture_output=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("name", CASES)
def test_absent_parts_leave_no_trace(name: str) -> None:
    text = CASES[name]
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert "{{" not in text and "{%" not in text and "None" not in text
    # What a job does is in hpctrain, so that a person can read its script.
    assert len(text.splitlines()) <= 60
    assert max(len(line) for line in text.splitlines()) <= 140
