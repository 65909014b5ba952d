"""A folder in shared memory for the files of Open MPI on a host, so that each file's run is known.

mpirun and its ranks put segments of 16 MiB a rank into ``/dev/shm`` and session files into the temporary folder. They
remove both at their end, but not when all are killed at once, and the names of segments do not show whether a process
still needs them. The lock of a folder does: the launcher and mpirun hold it, the kernel releases it when the last of
the two ends, however it ends, and the next start removes the folders that no process has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.control.launchers.shortages import SEGMENT_BYTES, SHARED, fault

_PREFIX = "hpctrain-open-mpi-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}", re.ASCII)
# `ompi_info --all --level 9` and `prte_info --all --level 9` of 5.0.11 list them.
_SETTINGS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory", "PRTE_MCA_prte_tmpdir_base")
# Any such setting of the user, in the environment or on mpirun's command line: some of them exclude each other.
_PLACES = re.compile(r"_(backing_directory|tmpdir_base)\b", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class OpenMpiFolder:
    """A folder that exists and that this process has locked.

    Attributes:
        descriptor: the open folder; the lock lasts for as long as a process has it open.
    """

    path: Path
    descriptor: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make mpirun and its ranks use the folder."""
        return dict.fromkeys(_SETTINGS, str(self.path))


def has_place(environment: Mapping[str, str], arguments: Iterable[str]) -> bool:
    """Whether the user's variables or arguments of mpirun say where Open MPI puts its files."""
    return any(_PLACES.search(word) for word in (*environment, *arguments))


@contextlib.contextmanager
def own_folder(wanted: bool, shared: Path = SHARED) -> Iterator[OpenMpiFolder | None]:
    """Make a folder for an mpirun of this host, and remove it with its contents afterwards.

    Yields:
        None where it is not wanted or does not fit: Open MPI then finds another place, or fails with its own message.
    """
    folder = _make(shared) if wanted and not fault(shared, SEGMENT_BYTES) else None
    try:
        yield folder
    finally:
        if folder:
            shutil.rmtree(folder.path, ignore_errors=True)
            os.close(folder.descriptor)


def remove_leftovers(shared: Path = SHARED) -> list[Path]:
    """Remove the folders of this user's runs that were killed with their mpirun, and return their former paths.

    A folder stays while its launcher or mpirun lives, which is also seen from another container, or while a rank that
    outlived them has it in its memory.
    """
    removed = []
    for path in sorted(shared.glob(f"{_PREFIX}*")):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError), _locked(path) as descriptor:
            if _is_own(descriptor, path) and not _is_mapped(path):
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _make(shared: Path) -> OpenMpiFolder | None:
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_own(descriptor, path):
            return OpenMpiFolder(path=path, descriptor=descriptor)
    except OSError:
        # Another start found the folder before it was locked, and removes it as a leftover.
        pass
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The descriptor of a folder, locked.

    Raises:
        OSError: another process has locked it, or it is no folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_own(descriptor: int, path: Path) -> bool:
    """Whether an open folder is still at its path, belongs to this user, and is closed to all others."""
    found, there = os.fstat(descriptor), path.lstat()
    same = (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)
    return same and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _is_mapped(path: Path) -> bool:
    """Whether a process of this user has a file of the folder in its memory."""
    inside = os.fsencode(path) + b"/"
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Processes of other users cannot be read, and cannot read the folder either.
        with contextlib.suppress(OSError):
            if inside in maps.read_bytes():
                return True
    return False
