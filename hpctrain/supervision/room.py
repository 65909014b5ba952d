"""What this host lacks for ranks to start: an MPI says it in words of its own, or in none."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Measured with Open MPI 5.0.11: each rank's segment is 16 MiB, of which it writes some 70 KB, and it looks whether all
# of it would fit. mpirun writes between 64 and 512 KiB into the temporary folder.
SEGMENT_BYTES = 17 << 20
TEMPORARY_BYTES = 1 << 20
# Where Open MPI's mpirun looks, in its order.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")


def shortages(environment: Mapping[str, str] = os.environ, shared: Path = Path("/dev/shm")) -> Iterator[str]:  # noqa: S108
    """What is too short here for ranks of an MPI, each with its remedy."""
    folder = Path(next((environment[name] for name in _TEMPORARY if environment.get(name)), "/tmp"))  # noqa: S108
    if fault := _fault(folder, TEMPORARY_BYTES):
        yield f"mpirun's temporary folder {folder} {fault}: free some space there, or name another with TMPDIR=DIR"
    if fault := _fault(shared, SEGMENT_BYTES):
        yield f"{shared}, through which the ranks of a host talk, {fault}: give a container more with --shm-size=1g"
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    if limit < SEGMENT_BYTES:
        yield f"no file may be longer than {limit:,.0f} bytes here: ulimit -f unlimited"


def _fault(folder: Path, wanted: int) -> str:
    """What is wrong with a folder that files of so many bytes are to be written to, as the end of a sentence."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".hpctrain-") as file:
            # A disk that is full has room for no more than the name.
            file.write(b"\0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return f"has {free / 1e6:.3g} MB free, and {wanted / 1e6:.3g} MB are needed" if free < wanted else ""
