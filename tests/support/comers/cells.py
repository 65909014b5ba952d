"""One script of others, unchanged, under one launcher, and what it printed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.hosts.local_hosts import LocalHosts
from support.launching import AS_ROOT
from support.pages import ROOT, commands
from support.slurm.local_slurm import LocalSlurm

SCRIPTS = Path(__file__).with_name("scripts")
HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
# `make test LEAVE_OUT=thorough` puts the frameworks beside the environment.
_BESIDE = ROOT / ".frameworks"
OF_FRAMEWORKS = {
    "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_BESIDE)))),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
VARIABLES = {**AS_ROOT, **OF_FRAMEWORKS, "TF_CPP_MIN_LOG_LEVEL": "2"}
STEPS = 10
# Runs a command in a folder with these variables; returns its status and what it printed.
Run = Callable[[list[str], Path, Mapping[str, str]], tuple[int, str]]


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


def all_losses(output: str) -> list[float]:
    """Of each step of each script that :file:`all.py` or :file:`frameworks.py` ran, in their order."""
    return [float(loss) for loss in re.findall(r"step \d+ loss (\d+\.\d+)\s*$", output, re.MULTILINE)]


def losses(output: str) -> dict[int, float]:
    """By step; the last word of a step that was trained again counts."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\d+\.\d+)\s*$", output, re.MULTILINE)
    }


def missing() -> str | None:
    """What makes Lightning, Accelerate and Transformers available; None where they are."""
    if _BESIDE.exists() or all(map(find_spec, ("lightning", "accelerate", "transformers"))):
        return None
    return "no Lightning and Transformers: make .frameworks/installed.stamp"


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


def _difference(found: Mapping[int, float], expected: Mapping[int, float]) -> float | None:
    """None if a step is missing."""
    if found.keys() != expected.keys():
        return None
    return max(abs(found[step] - expected[step]) for step in expected)
