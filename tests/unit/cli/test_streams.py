"""Streams that are closed, or behind which a disk is full: a sentence and a status, and a run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert first.startswith("hpctrain: cannot write to stdout: ")


@pytest.mark.parametrize("redirection", [_CLOSED_MESSAGES, "2>/dev/full"])
def test_a_message_that_cannot_be_written_changes_no_status(redirection):
    assert start(redirection, "--version").returncode == 0
    assert start(redirection, "run", "digit").returncode == 2
    assert start(f"{_CLOSED_OUTPUT} {redirection}", "run", "digit").returncode == 2
    assert start(f"{_CLOSED_OUTPUT} {redirection}", "--version").returncode == 1


_SHOW_AT_ONCE = """
import os, sys
from hpctrain.cli.streams import open_streams
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
from hpctrain.cli.streams import close_streams, open_streams
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
    (tmp_path / "script.py").write_text("print('of the rank')\nraise SystemExit(5)\n")
    ended = start(redirections, "run", "script.py", "--run-dir", "run", cwd=tmp_path)
    assert ended.returncode == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert json.loads((tmp_path / "run" / "ranks" / "rank-0.json").read_text())["exit_code"] == 5
    # No file of the run got the number, and with it the output, of a stream that was closed.
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "of the rank\n"
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["start", "fault", "end"]
