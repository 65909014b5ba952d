"""The record that each rank keeps of itself, which the launcher and the report read, and the processes of a run.

The files of a run directory can be damaged, or come from somebody else, with the number of any process in them. What a
file says is therefore only where to look: a process belongs to a run if it is this user's and holds the run's directory
open, as the launcher and every rank do. A directory has no second name, so nobody else can make a process appear to.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel

from hpctrain.common.cluster.machine import GroupMemory
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, matching
from hpctrain.common.run.directory import RunDirectory, read_model, write_json
from hpctrain.common.run.value_types import Count, Seconds, Text

LOST_CONNECTION = re.compile(r"Connection (?:reset|closed) by peer|Broken pipe")
"""What Gloo says, in the error of a rank, of a connection that the other side closed."""

# A process's start is computed from the boot time, which two processes can read a clock adjustment apart.
_START_TOLERANCE_SECONDS = 2.0
_FINAL_TRIES = 5
_PAUSE_SECONDS = 0.2


class RankError(BaseModel):
    """The error of a rank. ``code``: of an error of hpctrain. ``refused``: another attempt would raise it again."""

    type: Text
    message: Text
    code: str = ""
    refused: bool = False


class OwnTraining(BaseModel):
    """Checksums of what a rank of a script has trained while it sent next to nothing to the others."""

    shapes: Text
    values: Text


class RankRecord(BaseModel):
    """``ranks/rank-N.json``.

    Attributes:
        status: ``lost`` is what the others write of a rank that died when they go on without it.
        trained: what a rank of a script has trained by itself, as it seems.
        log_begin: where in its log this attempt begins, in bytes: there is one log for all.
        peak_bytes: the most memory that the rank itself had, where it has recorded its end.
        worker_bytes: the same of that of its processes which had the most.
        cpu_seconds: that they all computed.
        memory: of its host at the rank's begin.
    """

    rank: Count
    host: Text
    pid: Count
    started: Seconds
    status: Literal["running", "done", "failed", "resumable", "lost"]
    listens: bool = False
    joined: bool = False
    log_begin: Count = 0
    ended: Seconds = 0.0
    exit_code: int = 0
    error: RankError | None = None
    trained: OwnTraining | None = None
    peak_bytes: Count = 0
    worker_bytes: Count = 0
    cpu_seconds: Seconds = 0.0
    memory: GroupMemory | None = None

    @property
    def vanished(self) -> bool:
        """Whether the rank ended without recording it, for example by a signal; known on this host only."""
        return self.status == "running" and self.host == socket.gethostname() and self.process() is None

    def process(self) -> psutil.Process | None:
        """The rank's process if it is alive on this host, and not a later one with its number."""
        return living_process(self.host, self.pid, self.started)

    def own_process(self, directory: RunDirectory) -> psutil.Process | None:
        """The same, if it proves to be the run's (see :func:`works_in`)."""
        process = self.process()
        return process if process and works_in(process, directory.path) else None


def processes_with(*words: str) -> list[int]:
    """The numbers of this host's processes, of all users, whose command lines have all of these words."""
    named = (process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"])
    return [process.pid for process in named if set(words) <= set(process.info["cmdline"])]


def hold(directory: RunDirectory) -> int:
    """Open a run's directory, by which this process is known to belong to the run; returns the descriptor."""
    try:
        return os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise disk_error(error, directory.path) from error


@contextlib.contextmanager
def holding(directory: RunDirectory) -> Iterator[None]:
    """Hold a run's directory open meanwhile."""
    descriptor = hold(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def works_in(process: psutil.Process, path: Path) -> bool:
    """Whether a process is this user's and holds the run directory ``path`` open; False where that cannot be seen."""
    try:
        wanted = path.stat()
        if process.uids().real != os.getuid():
            return False
        descriptors = [*Path(f"/proc/{process.pid}/fd").iterdir()]
    except (OSError, psutil.Error):
        return False
    return any(_is(descriptor, wanted) for descriptor in descriptors)


def _is(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        status = descriptor.stat()
    except OSError:
        # The descriptor was closed meanwhile.
        return False
    return (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino)


def living_process(host: str, pid: int, at: float) -> psutil.Process | None:
    """The process with this number at a time, if it is alive on this host and not a later one."""
    if host != socket.gethostname():
        return None
    try:
        process = psutil.Process(pid)
        same = process.create_time() < at + _START_TOLERANCE_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    # A record can have any number.
    except (psutil.NoSuchProcess, OverflowError, ValueError):
        return None


def ranks_listen(directory: RunDirectory) -> bool:
    """Whether the ranks have recorded that they end in good order when they are asked to stop."""
    return any(record.listens for record in read_records(directory).values())


def read_records(directory: RunDirectory, unread: list[HpctrainError] | None = None) -> dict[int, RankRecord]:
    """The records that can be read, by rank; a rank that never started has none.

    Args:
        unread: gets why others cannot be read, which a crash of the machine can damage.
    """
    records: list[RankRecord] = []
    problems = [] if unread is None else unread
    paths: list[Path] = []
    with _collected(problems):
        paths = matching(directory.ranks, "rank-*.json")
    for path in paths:
        with _collected(problems):
            record = read_model(path, RankRecord)
            if directory.rank(record.rank) != path:
                problem = f"it is {record.rank}, whose file is another"
                raise HpctrainError(
                    "HT-file-value", "{where}: {key}: {problem}", where=path, key="rank", problem=problem
                )
            records.append(record)
    return {record.rank: record for record in sorted(records, key=lambda record: record.rank)}


@contextlib.contextmanager
def _collected(problems: list[HpctrainError]) -> Iterator[None]:
    try:
        yield
    except HpctrainError as error:
        problems.append(error)


def final_records(directory: RunDirectory) -> tuple[dict[int, RankRecord], list[str]]:
    """The records of ranks that have ended, by rank, and why others cannot be read. A file server gets some time."""
    for number in range(_FINAL_TRIES):
        if number:
            time.sleep(_PAUSE_SECONDS)
        unread: list[HpctrainError] = []
        records = read_records(directory, unread)
        if not unread:
            break
    return records, [error.message for error in unread]


def is_own_record(directory: RunDirectory, rank: int) -> bool:
    """Whether the record of a rank is this process's, or cannot be read.

    Where it is not, another attempt has begun without this process, which a host that was cut off still runs.
    """
    path = directory.rank(rank)
    try:
        record = read_model(path, RankRecord)
    except HpctrainError:
        return path.exists()
    return (record.host, record.pid) == (socket.gethostname(), os.getpid())


def write_record(directory: RunDirectory, record: RankRecord) -> None:
    """Write or replace a rank's record."""
    write_json(directory.rank(record.rank), record.model_dump(mode="json"))
