"""The program's streams, closed or on a full disk, and its end: nothing is lost by its being quick."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.refusals import codes

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
_CLOSED_OUTPUT, _CLOSED_MESSAGES = ">&-", "2>&-"


def start(redirections: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What the command line ends with, started by a shell that redirects its streams."""
    words = ["sh", "-c", f'exec "$@" {redirections}', "sh", *_PROGRAM, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.mark.parametrize("arguments", [("--version",), ("plan", "--help"), ("recipes", "show", "digits")])
@pytest.mark.parametrize("redirection", [_CLOSED_OUTPUT, ">/dev/full"])
def test_results_that_cannot_be_written_are_one_message_and_status_1(arguments, redirection):
    ended = start(redirection, *arguments)
    assert (ended.returncode, ended.stdout) == (1, "")
    first, _ = ended.stderr.splitlines()
    assert first.startswith("hpctrain: ") and "stdout: " in first


@pytest.mark.parametrize("redirection", [_CLOSED_OUTPUT, ">/dev/full"])
def test_an_error_as_json_that_cannot_be_written_keeps_its_status(redirection):
    ended = start(redirection, "recipes", "show", "digit", "--json")
    assert (ended.returncode, codes(ended.stderr)) == (2, ["HT-recipe-unknown"])
    ended = start(redirection, "recipes", "list", "--json")
    assert (ended.returncode, codes(ended.stderr)) == (1, ["HT-output-not-written"])


@pytest.mark.parametrize("redirection", [_CLOSED_MESSAGES, "2>/dev/full"])
def test_a_message_that_cannot_be_written_changes_no_status(redirection):
    assert start(redirection, "--version").returncode == 0
    assert start(redirection, "run", "digit").returncode == 2
    assert start(f"{_CLOSED_OUTPUT} {redirection}", "run", "digit").returncode == 2
    assert start(f"{_CLOSED_OUTPUT} {redirection}", "--version").returncode == 1


_SHOW_AT_ONCE = """
import os, sys
from hpctrain.cli.program import open_streams
open_streams()
sys.stdout.write("a result")
print("a message", file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize(("unbuffered", "shown"), [("1", "a result"), ("", "")])
def test_messages_are_seen_at_once_and_results_where_python_is_unbuffered(unbuffered, shown):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-c", _SHOW_AT_ONCE]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert (ended.stdout, ended.stderr) == (shown, "a message\n")


_TELL = """
import sys
from hpctrain.cli.program import close_streams, open_streams
open_streams()
print("a message", file=sys.stderr)
sys.exit(close_streams(5))
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_message_to_a_full_pipe_that_does_not_block_is_dropped(unbuffered):
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1 << 16))
        ended = subprocess.run(
            [sys.executable, "-c", _TELL],
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert (ended.returncode, ended.stdout) == (5, b"")


def test_a_reader_that_wants_no_more_is_no_fault():
    words = ["sh", "-c", '"$@" recipes show digits | true', "sh", *_PROGRAM]
    assert subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirections",
    [f"{_CLOSED_OUTPUT} {_CLOSED_MESSAGES}", pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.long)],
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
