"""One script of others, unchanged, under one launcher: what it printed, and how long a killed rank took to be named."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.framework_scripts import VARIABLES as OF_FRAMEWORKS
from support.framework_scripts import missing
from support.hosts.local_hosts import LocalHosts
from support.launching import AS_ROOT
from support.pages import commands
from support.slurm.local_slurm import LocalSlurm

SCRIPTS = Path(__file__).with_name("scripts")
HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
VARIABLES = {**AS_ROOT, **OF_FRAMEWORKS, "TF_CPP_MIN_LOG_LEVEL": "2"}
STEPS = 10
# Seconds a step of a script in which a rank is to be killed.
_PAUSE = "0.5"
# Script: what it is called on the pages, and the options that it needs.
NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("DDP", ()),
    "fsdp2": ("FSDP2", ()),
    "nanogpt": ("nanoGPT-like", ()),
    "titan": ("torchtitan-like", ()),
    "lightning_fit": ("Lightning", ()),
    "accelerate_loop": ("Accelerate", ()),
    "trainer": ("Trainer", ()),
    "horovod_torch": ("Horovod, PyTorch", ("--backend", "horovod")),
    "horovod_keras": ("Horovod, Keras", ("--backend", "horovod")),
    "tf_distribute": ("tf.distribute", ("--backend", "multi_worker")),
}
# Runs a command in a folder with these variables; returns its status and what it printed.
Run = Callable[[list[str], Path, Mapping[str, str]], tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """How two ranks are started.

    Attributes:
        options: of ``hpctrain run``, or of another ``command`` of hpctrain.
        run: where it is typed.
        kill: ends a process of rank 1, by its number on its host.
    """

    options: tuple[str, ...]
    run: Run
    command: str = "run"
    kill: Callable[[str, int], None] = lambda host, pid: os.kill(pid, 9)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of it. ``difference``: the largest between its losses and those of one process."""

    status: int
    seconds: float
    difference: float | None
    output: str
    named_seconds: float | None = None
    code: str = ""

    @property
    def right(self) -> bool:
        return self.status == 0 and self.difference is not None and self.difference < 1e-6


def on_this_machine(command: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout


def in_slurm(slurm: LocalSlurm, *size: str) -> Run:
    """Type a command in an allocation, or on the first node if no size is asked for."""

    def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        script = 'cd "$0" && "$@"; echo "status $?"'
        job = ("salloc", *size, f"--chdir={folder}") if size else ()
        output = slurm.run(*job, "sh", "-c", script, str(folder), *command, check=False, timeout=400, **variables)
        status = re.search(r"^status (\d+)$", output, re.MULTILINE)
        return int(status[1]) if status else -1, output

    return run


def on_hosts(hosts: LocalHosts) -> Run:
    """Type a command on the first host."""

    def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        done = hosts.run("h1", *command, cwd=folder, check=False, timeout=400, **variables)
        return done.returncode, done.stdout

    return run


def killing_on(hosts: LocalHosts) -> Callable[[str, int], None]:
    """Kill a process by its number on a host."""

    def kill(host: str, pid: int) -> None:
        hosts.run(host, "kill", "-KILL", str(pid))

    return kill


def losses(output: str) -> dict[int, float]:
    """By step; the last word of a step that was trained again counts."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\d+\.\d+)\s*$", output, re.MULTILINE)
    }


def require(script: str) -> None:
    """Skip a test whose script needs what is not installed."""
    name = Path(script).stem
    if name.startswith("horovod"):
        pytest.importorskip("horovod")
    pytest.importorskip("tensorflow" if name in ("horovod_keras", "tf_distribute") else "torch")
    if name in ("lightning_fit", "accelerate_loop", "trainer") and (reason := missing()):
        pytest.skip(reason)


def printed(place: str) -> list[list[str]]:
    """The commands of the page for comers: of ``here``, of ``hosts`` (with ``-H``), or to ``submit``."""
    found = [list(command.words) for command in commands() if command.page == "docs/coming-from.md" and command.whole]
    places = ["submit" if words[0] == "submit" else "hosts" if "-H" in words else "here" for words in found]
    return [words for words, of in zip(found, places, strict=True) if of == place]


def execute(words: list[str], run: Run, folder: Path) -> None:
    """Run a command of the page as it is printed; its losses have to be those of one process."""
    script = Path(words[1]).stem
    shutil.copy(SCRIPTS / words[1], folder)
    status, output = run([HPCTRAIN, *words], folder, VARIABLES)
    difference = _difference(losses(output), alone(framework(script)))
    assert status == 0 and difference is not None and difference < 1e-6, f"status {status}, {difference}: {output}"


@functools.cache
def alone(framework: str) -> dict[int, float]:
    """The losses of one process on all samples, which has no hpctrain; all scripts of a framework train one network."""
    command = [sys.executable, str(SCRIPTS / ("tf_distribute.py" if framework == "keras" else "nanogpt.py"))]
    with tempfile.TemporaryDirectory() as folder:
        status, output = on_this_machine(command, Path(folder), VARIABLES)
    found = losses(output)
    assert status == 0 and len(found) == STEPS and found[STEPS - 1] < found[0], output
    return found


def framework(script: str) -> str:
    """``torch`` or ``keras``."""
    return "keras" if script in ("horovod_keras", "tf_distribute") else "torch"


def whole(script: str, launcher: Launcher, folder: Path, expected: Mapping[int, float]) -> Cell:
    """Run a script to its end."""
    started = time.monotonic()
    status, output = launcher.run(_command(script, launcher), folder, VARIABLES)
    difference = _difference(losses(output), expected)
    return Cell(status=status, seconds=time.monotonic() - started, difference=difference, output=output)


def killed(script: str, launcher: Launcher, folder: Path, expected: Mapping[int, float]) -> Cell:
    """Kill rank 1 after the sixth step, then resume the run; the status is that of the resumed one.

    ``code`` is the recorded error of the killed one, if it ended as a failure.
    """
    run, killing = folder / "run", _Killing(folder / "run", launcher.kill)
    started = time.monotonic()
    thread = threading.Thread(target=killing.wait_and_kill, daemon=True)
    thread.start()
    status, output = launcher.run([*_command(script, launcher), "--", _PAUSE], folder, VARIABLES)
    ended = time.time()
    killing.ended = True
    thread.join()
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    failure = summary.get("failure") or {}
    named = bool(killing.at) and status != 0 and failure.get("rank") == 1
    again = [HPCTRAIN, "run", "--resume", "--run-dir", "run"]
    resumed, more = launcher.run(again, folder, VARIABLES)
    return Cell(
        status=resumed,
        seconds=time.monotonic() - started,
        difference=_difference(losses(output + more), expected),
        output=f"exit {status}\n{output}\nresumed:\n{more}",
        named_seconds=ended - killing.at if named and killing.at else None,
        code=failure.get("code", ""),
    )


def _command(script: str, launcher: Launcher) -> list[str]:
    _, options = NAMES[script]
    path = str(SCRIPTS / f"{script}.py")
    return [HPCTRAIN, launcher.command, path, *options, *launcher.options, "--run-dir", "run"]


def _difference(found: Mapping[int, float], expected: Mapping[int, float]) -> float | None:
    """None if a step is missing."""
    if found.keys() != expected.keys():
        return None
    return max(abs(found[step] - expected[step]) for step in expected)


class _Killing:
    """Kills rank 1 when rank 0 has printed its sixth loss."""

    def __init__(self, run: Path, kill: Callable[[str, int], None]) -> None:
        self._run = run
        self._kill = kill
        self.ended = False
        self.at: float | None = None

    def wait_and_kill(self) -> None:
        log = self._run / "logs" / "rank-0.log"
        while not self.ended:
            if log.exists() and "step 5 loss" in log.read_text(errors="replace"):
                record = json.loads((self._run / "ranks" / "rank-1.json").read_text())
                self._kill(record["host"], record["pid"])
                self.at = time.time()
                return
            time.sleep(0.02)
