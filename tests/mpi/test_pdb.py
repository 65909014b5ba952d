"""``hpctrain run --pdb`` on a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RUNS
from support.launching import AS_ROOT
from support.refusals import codes

SCRIPT = """
import numpy as np
import hpctrain as ht

comm = ht.init()
answer = 40 + comm.rank
breakpoint()
total = comm.allreduce(np.array([float(answer)]), "sum")
print("total", total)
# All ranks fail, and none takes rank 0's prompt away.
raise ValueError(answer)
"""


class Terminal:
    """A terminal with somebody before it."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.shown = ""

    def wait_for(self, pattern: str, seconds: float = 100) -> None:
        """Until this was shown behind what was waited for before."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self.ours, 4096).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def type(self, text: str) -> None:
        os.write(self.ours, f"{text}\n".encode())


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    os.close(made.theirs)
    os.close(made.ours)


@contextlib.contextmanager
def started(
    folder: Path, terminal: Terminal, ranks: str, *options: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "script.py").write_text(SCRIPT)
    run = ["run", "script.py", "--pdb", "-np", ranks, "--run-dir", "run", *options]
    command = [sys.executable, "-m", "hpctrain", *run]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **AS_ROOT, **variables}, **streams)
    try:
        yield process
    finally:
        # Its first SIGTERM asks, its second one ends its ranks.
        while process.poll() is None:
            process.terminate()
            time.sleep(1)


@pytest.mark.parametrize("options", [(), ("--launcher", "torchrun", "--backend", "gloo")], ids=["mpirun", "torchrun"])
def test_rank_0_is_debugged_while_the_others_wait(tmp_path: Path, terminal: Terminal, options: tuple[str, ...]) -> None:
    before = termios.tcgetattr(terminal.ours)
    with started(tmp_path, terminal, "2", *options, HPCTRAIN_TIMEOUT="2", HPCTRAIN_STALL="1") as process:
        terminal.wait_for(r"total = comm.*\(Pdb\) ")
        # Longer than the user's limit, and than a deadlock takes to be seen.
        time.sleep(4)
        terminal.type("answer + 2")
        terminal.wait_for(r"42.*\(Pdb\) ")
        terminal.type("c")
        # Its own output is there in its place, and so is the error.
        terminal.wait_for(r"total \[81\.\].*ValueError: 40.*raise ValueError\(answer\)\s*\(Pdb\) ")
        time.sleep(4)
        terminal.type("answer")
        terminal.wait_for(r"40\s+\(Pdb\) ")
        terminal.type("q")
        terminal.wait_for(r"HT-rank-exception")
        assert process.wait(60) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]["rank"] == 0
    assert termios.tcgetattr(terminal.ours) == before


def test_a_run_that_ends_at_the_prompt_gives_the_terminal_back(tmp_path: Path, terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.ours)
    with started(tmp_path, terminal, "1") as process:
        terminal.wait_for(r"\(Pdb\) ")
        assert termios.tcgetattr(terminal.ours) != before, "readline reads without an echo"
        process.terminate()
        terminal.wait_for(r"HT-run-interrupted")
        process.wait(60)
    assert termios.tcgetattr(terminal.ours) == before


@pytest.mark.parametrize("arguments", [["script.py"], ["script.py", "--dry-run"], ["digits"]])
def test_it_needs_a_script_and_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    assert main(["run", *arguments, "--pdb"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-pdb-no-terminal"]
    with contextlib.suppress(FileNotFoundError):
        assert not [*(tmp_path / RUNS).iterdir()]
