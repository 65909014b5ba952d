"""The program's streams, closed or on a full disk, and its end: nothing is lost by its being quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A command that prints more than a pipe holds, and leaves work to the end of the process.
_COMMAND = """
import atexit, sys, tempfile, weakref
import hpctrain.cli.main as module
from hpctrain.cli.program import program

class Left: ...
left = Left()

def main():
    weakref.finalize(left, print, "finalized")
    atexit.register(print, "at exit")
    print("x" * 1_000_000)
    if sys.argv[1:]:
        raise ValueError("a defect")
    return 4

module.main = main
program()
"""


@pytest.mark.parametrize(("arguments", "status"), [((), 4), (("raise",), 1)])
def test_all_output_and_all_that_is_left_to_the_end_comes_with_the_status(arguments, status):
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert sorted(ended.stdout.split("\n")) == ["", "at exit", "finalized", "x" * 1_000_000]
    assert ("ValueError: " in ended.stderr) == (status == 1)


@pytest.mark.parametrize(("arguments", "status"), [(("--version",), 0), (("run", "digit"), 2)])
def test_the_module_ends_with_the_status_of_its_command(arguments, status):
    ended = subprocess.run([sys.executable, "-m", "hpctrain", *arguments], capture_output=True, timeout=60, check=False)
    assert ended.returncode == status


_PROGRAM = [sys.executable, "-m", "hpctrain"]


def start(redirections: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What the command line ends with, started by a shell that redirects its streams."""
    words = ["sh", "-c", f'exec "$@" {redirections}', "sh", *_PROGRAM, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_what_cannot_be_written_changes_no_status_of_a_mistake():
    ended = start(">/dev/full", "recipes", "show", "digits")
    assert ended.returncode == 1 and "No space left" in ended.stderr
    assert start(">/dev/full 2>/dev/full", "recipes", "show", "digit", "--json").returncode == 2


def test_a_reader_that_wants_no_more_is_no_fault():
    words = ["sh", "-c", '"$@" recipes show digits | true', "sh", *_PROGRAM]
    assert subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirections",
    [">&- 2>&-", pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.long)],
)
def test_a_run_goes_on_without_its_streams(redirections, tmp_path):
    (tmp_path / "script.py").write_text("print('rank 0')\nraise SystemExit(5)\n")
    ended = start(redirections, "run", "script.py", "--run-dir", "run", cwd=tmp_path)
    assert ended.returncode == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert json.loads((tmp_path / "run" / "ranks" / "rank-0.json").read_text())["exit_code"] == 5
    # No file of the run got the number, and with it the output, of a stream that was closed.
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "rank 0\n"
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["start", "fault", "end"]
