"""Runs programs of a cluster with a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from hpctrain.common.errors import HpctrainError

_SECONDS = 60.0
# Slurm's programs take options from these, which would go before those of a job script, or change what is printed.
_SLURM_OPTIONS = ("SACCT_", "SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_")


def run_program(
    program: str,
    *arguments: str,
    seconds: float = _SECONDS,
    environment: Mapping[str, str] | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the caller judges its exit status.

    Args:
        environment: its own; this process's by default. What a user set for Slurm's programs is left out.

    Raises:
        HpctrainError: it is not installed or cannot be run (exit code 2), or it did not answer in time (exit code 1).
    """
    inherited = os.environ if environment is None else environment
    environment = {name: value for name, value in inherited.items() if not name.startswith(_SLURM_OPTIONS)}
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise HpctrainError("HT-program-not-found", "{program} is not on the PATH", program=program)
    try:
        return subprocess.run(
            [program, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
            input=given,
        )
    except OSError as error:
        raise HpctrainError(
            "HT-program-failed", "{program} cannot be run: {reason}", program=program, reason=error.strerror
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HpctrainError(
            "HT-program-no-answer",
            "{program} did not answer within {seconds:g} s",
            exit_code=1,
            program=program,
            seconds=seconds,
        ) from error


def program_output(
    program: str, *arguments: str, seconds: float = _SECONDS, environment: Mapping[str, str] | None = None
) -> str:
    """The output of a program; empty if it is not installed, fails, or does not answer."""
    try:
        done = run_program(program, *arguments, seconds=seconds, environment=environment)
    except HpctrainError:
        return ""
    return done.stdout if done.returncode == 0 else ""
