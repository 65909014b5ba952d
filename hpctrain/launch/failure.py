"""Which rank made a run fail, and why."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.records import RankRecord, read_records
from hpctrain.rundir import RunDirectory

LOG_LINES = 20

# Open MPI wraps these sentences at any blank.
_OPEN_MPI_SIGNAL = re.compile(
    r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+\d+\s+on.+?on\s+signal\s+(?P<signal>\d+)", re.S
)
_INTEL_SIGNAL = re.compile(r"RANK\s+(?P<rank>\d+)\s+PID\s+\d+.*?KILLED\s+BY\s+SIGNAL:\s+(?P<signal>\d+)", re.S)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first cause that is known.

    Attributes:
        message: rank, host and error in one sentence.
        rank, host: None where no single rank is to blame.
        log: the file to read on in, None where ``lines`` were printed outside the logs, mostly by mpirun.
        lines: the end of it.
        exit_code: 2 where a rank found wrong use, else 1.
    """

    message: str
    rank: int | None = None
    host: str | None = None
    log: Path | None = None
    lines: tuple[str, ...] = ()
    exit_code: int = 1

    def __str__(self) -> str:
        if not self.lines:
            return self.message
        source = f"the end of {self.log}" if self.log else "printed outside the logs"
        return "\n".join([self.message, f"  {source}:", *(f"    {line}" for line in self.lines)])


def find_failure(
    directory: RunDirectory, ranks: int, *, output: str, exit_status: int, lost: int | None = None
) -> Failure | None:
    """What made a run fail that has ended; None if every rank recorded that it is done.

    Args:
        directory: the run.
        ranks: how many there should have been.
        output: what the launcher printed.
        exit_status: the launcher's, negative for a signal as in ``subprocess``. Not trusted: mpirun exits 0 when it
            loses a whole node.
        lost: the rank that was seen dead, without an error recorded, while others lived.
    """
    records = read_records(directory)
    if len(records) == ranks and all(record.status == "done" for record in records.values()):
        return None
    killed = _killed(ranks, output, exit_status)
    failed = [record for record in records.values() if record.status == "failed"]
    # The launcher ends the other ranks with SIGTERM, so that signal is a cause only if there is no other.
    if killed and (killed[1] != signal.SIGTERM or (lost is None and not failed)):
        return _killed_failure(directory, records, *killed)
    if lost is not None:
        return _rank_failure(directory, records[lost], "died without recording an error: killed, or crashed")
    if failed:
        first = min(failed, key=lambda record: record.ended)
        assert first.error is not None
        cause = f"{first.error.type}: {first.error.message}" if first.error.message else first.error.type
        failure = _rank_failure(directory, first, f"failed: {cause}")
        wrong_use = first.error.type == HpctrainError.__name__ and first.exit_code == 2
        return replace(failure, exit_code=2) if wrong_use else failure
    lines = tuple(line for line in output.splitlines() if line.strip())[-LOG_LINES:]
    silent = [rank for rank in range(ranks) if rank not in records or records[rank].status != "done"]
    if len(silent) == 1 and silent[0] in records and not lines:
        return _rank_failure(directory, records[silent[0]], "ended before its work was done, without an error")
    names = ", ".join(map(str, silent))
    return Failure(message=f"rank {names} did not finish; exit status {exit_status}", lines=lines)


def _killed(ranks: int, output: str, exit_status: int) -> tuple[int, signal.Signals] | None:
    """The rank that a signal ended, as its launcher tells it; MPICH's names any rank of the job."""
    if ranks == 1 and exit_status < 0:
        return 0, signal.Signals(-exit_status)
    if match := _OPEN_MPI_SIGNAL.search(output) or _INTEL_SIGNAL.search(output):
        return int(match["rank"]), signal.Signals(int(match["signal"]))
    return None


def _killed_failure(
    directory: RunDirectory, records: Mapping[int, RankRecord], rank: int, by: signal.Signals
) -> Failure:
    what = f"was killed by signal {by.value} ({by.name})"
    if by == signal.SIGKILL:
        what += ", which is also what the system sends to a process when memory runs out"
    if rank in records:
        return _rank_failure(directory, records[rank], what)
    return Failure(message=f"rank {rank} {what}", rank=rank)


def _rank_failure(directory: RunDirectory, record: RankRecord, what: str) -> Failure:
    log = directory.log(record.rank)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return Failure(
        message=f"rank {record.rank} on {record.host} {what}",
        rank=record.rank,
        host=record.host,
        log=log,
        lines=tuple(lines[-LOG_LINES:]),
    )
