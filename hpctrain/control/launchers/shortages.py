"""Finds what this host lacks for ranks to start, because an MPI reports it unclearly or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.files.disk import ANOTHER_RUN

# Measured with Open MPI 5.0.11: each rank's segment is 16 MiB, of which it writes some 70 KB, but it checks that all
# of it would fit. mpirun writes between 64 and 512 KiB into the temporary folder.
SEGMENT_BYTES = 17 << 20
TEMPORARY_BYTES = 1 << 20
# More than a rank's record and the first lines of its log.
_RECORD_BYTES = 1 << 16
SHARED = Path("/dev/shm")  # noqa: S108
# The variables in which Open MPI's mpirun looks for its temporary folder, in this order.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A resource that is too small, and what the user can do about it."""

    fault: str
    remedy: str


def shortages(
    environment: Mapping[str, str] = os.environ,
    shared: Path = SHARED,
    *,
    run: Path | None = None,
) -> Iterator[Shortage]:
    """The resources of this host that are too small for ranks of an MPI.

    Args:
        run: the run's directory, without room in which ranks cannot say what ended them.
    """
    if run and (problem := fault(run, _RECORD_BYTES)):
        yield Shortage(fault=f"{run} {problem}", remedy=f"free some space there, or {ANOTHER_RUN}")
    folder = mpirun_folder(environment)
    if problem := fault(folder, TEMPORARY_BYTES):
        yield Shortage(
            fault=f"mpirun's temporary folder {folder} {problem}",
            remedy="free some space there, or name another with TMPDIR=DIR",
        )
    if problem := fault(shared, SEGMENT_BYTES):
        yield Shortage(
            fault=f"{shared}, through which the ranks of a host talk, {problem}",
            remedy="give a container more with --shm-size=1g",
        )


def mpirun_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The temporary folder of mpirun."""
    return Path(next((environment[name] for name in _TEMPORARY if environment.get(name)), "/tmp"))  # noqa: S108


def fault(folder: Path, wanted: int) -> str:
    """Why a folder cannot take a file of so many bytes, as the end of a sentence; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".hpctrain-") as file:
            # A full disk still has room for a file without contents.
            file.write(b"\0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return f"has {free / 1e6:.3g} MB free, and {wanted / 1e6:.3g} MB are needed" if free < wanted else ""
