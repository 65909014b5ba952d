"""Programs of Slurm that print what the real ones of 22.05 printed, for tests without a Slurm."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.submission import Submission

_WIDTHS = (64, 64, 256, 64, 64, 64, 512, 64, 1024, 1024)


def row(job: str, state: str, directory: Path | str, **changes: Any) -> str:
    """A job as ``squeue --Format`` prints it: each field filled up with blanks, and a separator after it."""
    values = {
        "id": job,
        "state": state,
        "reason": "None",
        "start": "N/A",
        "used": "0:00",
        "limit": "1:00:00",
        "nodes": "",
        "status": "0",
        "command": f"{directory}/job.sh",
        "directory": str(directory),
        **changes,
    }
    return "".join(f"{value:<{width}}\x1f" for value, width in zip(values.values(), _WIDTHS, strict=True)) + "\n"


def write_submission(directory: RunDirectory, *jobs: str) -> None:
    """What `hpctrain submit` leaves of a submission."""
    directory.submission.write_text(Submission(cluster="generic", jobs=jobs).model_dump_json())


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> Path:
    """Put programs on the PATH, each a shell script; their calls are in the file that is returned, a line each."""
    calls = folder / "calls"
    calls.touch()
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, script in programs.items():
        program = bin_folder / name
        program.write_text(f'#!/bin/bash\necho {name} "$@" >> {shlex.quote(str(calls))}\n{script}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    return calls


def prints(text: str) -> str:
    """A script that prints a text as it is."""
    return f"printf %s {shlex.quote(text)}"


UNKNOWN_JOB = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
NO_CONTROLLER = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
NO_ACCOUNTING = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
