"""Stand-ins for hpctrain and Slurm's programs: they note how they were called, and do what the test says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_NOTE = """\
#!{python}
import json, os, signal, sys, time
if sys.argv[1:2] == ["job"]:
    os.execv(sys.executable, [sys.executable, "-m", "hpctrain", *sys.argv[1:]])
with open({notes!r}, "a") as file:
    file.write(json.dumps([{name!r}, sys.argv[1:], dict(os.environ)]) + "\\n")
{then}
"""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One program's start."""

    program: str
    arguments: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Programs:
    """A folder of stand-ins that goes first on the PATH."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, then: str = "") -> None:
        """A program that notes its call, then executes ``then``, lines of Python; ``hpctrain job`` is the real one."""
        path = self.folder / name
        path.write_text(_NOTE.format(python=sys.executable, notes=str(self.folder / "notes"), name=name, then=then))
        path.chmod(0o700)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}", **self.variables}

    def calls(self, program: str) -> list[Call]:
        """How a program was called, in order."""
        notes = self.folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        calls = [Call(program=name, arguments=given, environment=env) for name, given, env in map(json.loads, lines)]
        return [call for call in calls if call.program == program]

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        """Execute a job script as slurmd does, in a session of its own."""
        path = self.folder / "job.sh"
        path.write_text(script)
        job: Mapping[str, str] = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "1"}
        return subprocess.Popen(
            ["bash", str(path)],
            env={**self.environment, **job, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def slurm_programs(folder: Path) -> Programs:
    """A new folder with Slurm's own that a job calls at its end."""
    folder.mkdir()
    made = Programs(folder)
    made.add("scontrol")
    made.add("sbatch", "print('8;cluster')")
    return made


@contextlib.contextmanager
def started(programs: Programs, text: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = programs.start(text, **variables)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=100)


def end(programs: Programs, text: str, **variables: str) -> tuple[int, str]:
    with started(programs, text, **variables) as process:
        output, _ = process.communicate(timeout=100)
        return process.returncode, output
