"""The record that each rank keeps of itself, which the launcher and the report read."""

from __future__ import annotations

import os
import socket
import time
from typing import Literal

import psutil
from pydantic import BaseModel

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, read_model, write_json
from hpctrain.common.run.processes import works_in
from hpctrain.common.run.values import Count, Seconds

# A process's start is computed from the boot time, which two processes can read a clock adjustment apart.
_START_TOLERANCE_SECONDS = 2.0
_FINAL_TRIES = 5
_PAUSE_SECONDS = 0.2


class RankError(BaseModel):
    """The error of a rank. ``code``: of an error of hpctrain. ``refused``: another attempt would raise it again."""

    type: str
    message: str
    code: str = ""
    refused: bool = False


class RankRecord(BaseModel):
    """``ranks/rank-N.json``.

    Attributes:
        status: ``lost`` is what the others write of a rank that died when they go on without it.
        listens: the rank ends in good order when it is asked to stop.
        joined: whether it has met all other ranks.
        log_begin: where in its log this attempt begins, in bytes: there is one log for all.
    """

    rank: Count
    host: str
    pid: Count
    started: Seconds
    status: Literal["running", "done", "failed", "resumable", "lost"]
    listens: bool = False
    joined: bool = False
    log_begin: Count = 0
    ended: Seconds = 0.0
    exit_code: int = 0
    error: RankError | None = None

    @property
    def vanished(self) -> bool:
        """Whether the rank ended without recording it, for example by a signal; known on this host only."""
        return self.status == "running" and self.host == socket.gethostname() and self.process() is None

    def process(self) -> psutil.Process | None:
        """The rank's process if it is alive on this host, and not a later one with its number."""
        return living_process(self.host, self.pid, self.started)

    def own_process(self, directory: RunDirectory) -> psutil.Process | None:
        """The same, if it proves to be the run's (see :mod:`hpctrain.common.run.processes`)."""
        process = self.process()
        return process if process and works_in(process, directory.path) else None


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
    return any(record.listens for record in whole_records(directory))


def read_records(directory: RunDirectory) -> dict[int, RankRecord]:
    """All records, by rank; a rank that never started has none.

    Raises:
        HpctrainError: one is damaged.
    """
    records = [read_model(path, RankRecord) for path in directory.ranks.glob("rank-*.json")]
    return {record.rank: record for record in sorted(records, key=lambda record: record.rank)}


def whole_records(directory: RunDirectory, problems: list[str] | None = None) -> list[RankRecord]:
    """The records that can be read, by rank; a crash of the machine can damage others.

    Args:
        problems: gets why the others cannot be read.
    """
    found: list[RankRecord] = []
    for path in sorted(directory.ranks.glob("rank-*.json")):
        try:
            found.append(read_model(path, RankRecord))
        except HpctrainError as error:
            if problems is not None:
                problems.append(error.message)
    return sorted(found, key=lambda record: record.rank)


def final_records(directory: RunDirectory) -> tuple[dict[int, RankRecord], list[str]]:
    """The records of ranks that have ended, by rank, and why others cannot be read. A file server gets some time."""
    for number in range(_FINAL_TRIES):
        if number:
            time.sleep(_PAUSE_SECONDS)
        problems: list[str] = []
        found = whole_records(directory, problems)
        if not problems:
            break
    return {record.rank: record for record in found}, problems


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
    """Write or replace a rank's record.

    Raises:
        HpctrainError: the disk is full.
    """
    write_json(directory.rank(record.rank), record.model_dump(mode="json"))
