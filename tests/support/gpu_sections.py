"""The sections of ``make gpu``: which were asked for, how long each may take, and how its checks start programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

# A card is often free for ten minutes only.
MINUTES = {"engines": 10.0, "nccl": 9.0, "pipelines": 9.0, "recipes": 10.0, "loader": 4.0}
# The folder for the report, which `make gpu` sets; the ordinary suite has none, and no limit but that of each test.
REPORT, ONLY = "GPU_REPORT", "GPU_ONLY"
GPUS = torch.cuda.device_count()
on_gpus = pytest.mark.skipif(not GPUS, reason="PyTorch sees no GPU")
# What only `make gpu` runs, on a machine without a GPU too.
of_make_gpu = pytest.mark.skipif(not os.environ.get(REPORT), reason="only `make gpu` runs it")
# For a program to end once it is asked to, before it is killed.
_GRACE_SECONDS = 15.0

_began: dict[str, float] = {}


def chosen(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The sections that ``ONLY=…`` of ``make gpu`` names; by default all.

    Raises:
        pytest.UsageError: there is no section of a name.
    """
    names = [name.strip() for name in environment.get(ONLY, "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in MINUTES]:
        raise pytest.UsageError(f"ONLY={','.join(names)}: no section {unknown[0]!r}; there are {', '.join(MINUTES)}")
    return names or list(MINUTES)


def section_of(path: Path) -> str:
    """The section of a test module, whose name it has."""
    return path.stem.removeprefix("test_")


def left(section: str) -> float:
    """The seconds that a section may still take; its time begins with the first call."""
    began = _began.setdefault(section, time.monotonic())
    return began + 60 * MINUTES[section] - time.monotonic()


def is_over(section: str) -> bool:
    """Whether a section has no time left for anything but ending what it started."""
    return left(section) <= _GRACE_SECONDS + 5


def launch(
    folder: Path, *arguments: str, seconds: float = 300, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of hpctrain in a folder, for so long at most, and within the time of the section that is running.

    Args:
        status: the exit status that it has to have; None for any.
    """
    return execute([sys.executable, "-m", "hpctrain", *arguments], folder, seconds=seconds, status=status, **variables)


def execute(
    command: Sequence[str], folder: Path, *, seconds: float = 300, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run any program, as :func:`launch` does. What takes too long has 124 for its status, as of timeout(1)."""
    limit = seconds
    if _began and os.environ.get(REPORT):
        limit = min(seconds, left([*_began][-1]) - _GRACE_SECONDS)
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        late = False
        try:
            output, _ = process.communicate(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            late = True
            # Twice, because the first asks hpctrain to save.
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_GRACE_SECONDS / 3)
                    break
            else:
                output, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    done = subprocess.CompletedProcess(command, 124 if late else process.returncode, output)
    assert status in (None, done.returncode), f"status {done.returncode}, after {limit:.0f} s at most:\n{output}"
    return done
