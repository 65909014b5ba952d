"""Finds out why a run is not done: which rank failed first, or that it was interrupted and can be resumed."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.common.cluster.machine import GroupMemory
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import last_lines
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile
from hpctrain.common.run.events.kinds import StoppedEvent
from hpctrain.common.run.records import LOST_CONNECTION, RankRecord, final_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import RANKS_ALONE

LOG_LINES = 20

OUT_OF_MEMORY = "HT-rank-out-of-memory"
MEMORY_HINT = (
    "ask for more memory (Slurm's --mem, node.memory of a profile), or use less: fewer ranks on a host, fewer "
    "data.workers or num_workers, a smaller batch"
)
# Codes of ranks that something outside of them ended.
BY_A_SIGNAL = ("HT-rank-killed", "HT-rank-died", "HT-rank-silent")

# Open MPI may break these sentences at any blank.
_OPEN_MPI_SIGNAL = re.compile(
    r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+\d+\s+on.+?on\s+signal\s+(?P<signal>\d+)", re.S
)
# srun names a signal as strsignal does, and lists several tasks of a host in brackets.
_SRUN_SIGNAL = re.compile(r"srun: error: \S+: tasks? \[?(?P<rank>\d+)[^:]*: (?P<name>[A-Z][a-z]+(?: [a-z]+)*)")
# The same of a task that was killed because memory ran out.
_SRUN_MEMORY = re.compile(r"srun: error: \S+: tasks? \[?(?P<rank>\d+)[^:]*: Out Of Memory")
# srun says this first when a task has aborted the step, and kills the other tasks by SIGKILL.
_SRUN_ABORTED = re.compile(r"srun: Job step aborted|\*\*\* STEP \S+ ON \S+ CANCELLED")
_LOST_HOST = re.compile(
    r"lost\s+communication\s+with\s+a\s+remote\s+daemon.*?Remote\s+daemon:.*?on\s+node\s+(?P<open_mpi>\S+)"
    r"|srun: error: Node failure on (?P<srun>\S+)",
    re.S,
)
# Open MPI 5.0 fails this way once in many starts; the next start works.
_BAD_START = re.compile(r"PMIx\s+server's\s+listener\s+thread\s+failed\s+to\s+start")
# The host was lost after it was asked, or its daemon cannot connect to mpirun.
_NO_DAEMON = re.compile(r"daemon\s+failed\s+to\s+report\s+back.*?Remote\s+host:\s+(?P<host>\S+)", re.S)
# What CUDA and NVML say of a GPU that is broken, whatever runs on it.
_BROKEN_GPU = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|hardware stack error|GPU is lost|fallen off the bus|system not yet initialized"
)
# A script ends all ranks so, perhaps with a traceback in its log. Open MPI's and MPICH's words.
_ABORTED = (
    re.compile(
        r"on\s+rank\s+(?P<rank>\d+)\s+in\s+communicator\s+MPI_COMM_WORLD.+?errorcode:?\s+(?P<code>\d+)", re.S | re.I
    ),
    re.compile(r"called\s+MPI_Abort\(MPI_COMM_WORLD,\s+(?P<code>\d+)\)\s+-\s+process\s+(?P<rank>\d+)"),
)
# Open MPI ends a rank so whose connection another one's death has closed, and does not say which one that was.
_CLOSED = re.compile(r"\sin\s+Socket\s+closed.*?process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s.{1,300}?\scalling", re.S)
_INTEL_SIGNAL = re.compile(r"RANK\s+(?P<rank>\d+)\s+PID\s+\d+.*?KILLED\s+BY\s+SIGNAL:\s+(?P<signal>\d+)", re.S)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first known cause why a run is not done.

    Attributes:
        code: the stable name of the cause, of those in docs/reference/errors.md.
        message: rank, host and error in one sentence.
        rank, host: None where no single rank is to blame.
        log: the file to read on in, None where ``lines`` were printed outside the logs, mostly by mpirun.
        lines: the last lines of that log.
        exit_code: 2 where a rank found wrong use, 4 where the run can be resumed because no error of its own ended it,
            else 1.
        stopped: all ranks saved their state and left, because they were asked to.
        lost_hosts: those that are gone, where that is the cause.
        hint: what the user can do about it, where hpctrain knows.
        passing: nothing was started, for a temporary reason.
        refused: hpctrain raised the error on a rank, and another attempt would raise it again.
    """

    code: str
    message: str
    rank: int | None = None
    host: str | None = None
    log: Path | None = None
    lines: tuple[str, ...] = ()
    exit_code: int = 1
    stopped: bool = False
    lost_hosts: tuple[str, ...] = ()
    passing: bool = False
    refused: bool = False
    hint: str = ""

    @property
    def cause(self) -> dict[str, Any]:
        """The keys that describe it in the event ``fault`` and in the summary."""
        return {"code": self.code, "rank": self.rank, "host": self.host, "message": self.message}

    @property
    def status(self) -> Literal["failed", "resumable"]:
        """The resulting status of the run: ``failed`` or ``resumable``."""
        return "resumable" if self.exit_code == RESUMABLE else "failed"

    def __str__(self) -> str:
        source = f"the end of {self.log}" if self.log else "printed outside the logs"
        lines = [f"  {source}:", *(f"    {line}" for line in self.lines)] if self.lines else []
        return "\n".join([self.message, *lines, *([f"  {self.hint}"] if self.hint else [])])

    def without_log_of(self, shown: int) -> str:
        """The text, with its code in front, for a reader who has seen all output of rank ``shown``: of its log only the
        name.
        """
        kind = "stopped" if self.status == "resumable" else "error"
        seen = self.log and self.rank == shown
        known = replace(self, message=f"{self.message}\n  its log: {self.log}", lines=()) if seen else self
        return f"{kind}[{self.code}]: {known}"


def find_failure(
    directory: RunDirectory,
    ranks: int,
    *,
    output: str,
    exit_status: int,
    first_dead: int | None = None,
    fault_tolerant: bool = False,
) -> Failure | None:
    """The failure of a run that has ended; None if every rank recorded that it is done, apart from lost ones.

    Args:
        ranks: how many ranks the run should have had.
        exit_status: the launcher's, negative for a signal as in ``subprocess``. Not trusted: mpirun exits 0 when it
            loses a whole node.
        first_dead: the rank that was seen dead, without an error recorded, while others lived.
        fault_tolerant: the ranks go on without one that died.
    """
    records, unread = final_records(directory)
    left = _statuses_left(records, fault_tolerant=fault_tolerant)
    if len(records) == ranks and left == {"done"}:
        return _trained_alone(records)
    # Checked first, because the rest follows from it: the launcher sends the other ranks SIGTERM, at which they stop.
    if hosts := tuple(dict.fromkeys(match["open_mpi"] or match["srun"] for match in _LOST_HOST.finditer(output))):
        return _lost_failure(hosts)
    if len(records) == ranks and left and left <= {"done", "resumable"}:
        return Failure(
            code="HT-run-stopped", message=_stop_reason(directory, records), exit_code=RESUMABLE, stopped=True
        )
    failed = [record for record in records.values() if record.status == "failed"]
    if fault_tolerant and failed:
        # The error ended the run, not a killed rank: the others would have gone on without that one.
        return _raised(directory, min(failed, key=lambda record: record.ended))
    killed = _killed(ranks, records, output, exit_status)
    # What the launcher ended is the cause only if there is no other.
    if killed and (not killed.by_launcher or (first_dead is None and not failed)):
        return _killed_failure(directory, records, killed)
    aborted = None if failed else _aborted(directory, records, output)
    if aborted and first_dead in (None, aborted.rank):
        return aborted
    closed = _CLOSED.search(output)
    cut_off = int(closed["rank"]) if closed else None
    dead = cut_off if first_dead is None and not failed else first_dead
    if dead is not None and dead in records:
        return _died(directory, records, dead, others=cut_off == dead)
    if failed:
        first = min(failed, key=lambda record: record.ended)
        failure = _raised(directory, first)
        # A rank that was killed closes its connections, and those that notice may end the run before the launcher has
        # seen that rank's end.
        missed = first.error and LOST_CONNECTION.search(first.error.message) and "running" in left
        return replace(failure, exit_code=RESUMABLE) if missed else failure
    failure = _silent(directory, records, ranks, output=output, exit_status=exit_status)
    return replace(failure, message="; ".join([failure.message, *unread])) if unread else failure


def _died(directory: RunDirectory, records: Mapping[int, RankRecord], first: int, *, others: bool) -> Failure:
    """The failure of the first rank that ended, or of another one whose death closed that one's connection."""
    code, end = "HT-rank-died", "died without recording an error: killed, or crashed"
    dead = [records[first]]
    if others:
        dead = [record for record in records.values() if record.status == "running" and record.rank != first]
    if len(dead) == 1:
        return _rank_failure(directory, dead[0], code, end, exit_code=RESUMABLE)
    message = f"a rank {end}; its connection to rank {first} on {records[first].host} was closed"
    return Failure(code=code, message=message, exit_code=RESUMABLE)


def _trained_alone(records: Mapping[int, RankRecord]) -> Failure | None:
    """The failure where ranks with a process group have each trained a model of its own."""
    trained = [record.trained for record in records.values()]
    shapes = {each and each.shapes for each in trained}
    if None in shapes or len(shapes) > 1 or len({each and each.values for each in trained}) == 1:
        return None
    return Failure(
        code="HT-ranks-trained-alone",
        message=f"{len(records)} ranks have trained a model each: they made a process group, but never averaged "
        "gradients in it, and end with different parameters",
        hint="model = torch.nn.parallel.DistributedDataParallel(model) averages gradients; "
        f"{RANKS_ALONE.name}=1 hpctrain run … says that different models are meant",
    )


def _statuses_left(records: Mapping[int, RankRecord], *, fault_tolerant: bool) -> set[str]:
    """The statuses of the ranks that were not lost on the way."""
    left: list[str] = [record.status for record in records.values() if record.status != "lost"]
    if fault_tolerant and left and left[0] != "running":
        # These died after the first rank, which reports losses, had ended, so their records were never updated.
        return set(left) - {"running"}
    return set(left)


def _lost_failure(hosts: tuple[str, ...]) -> Failure:
    names = ", ".join(hosts)
    words = "host {} was lost, and its ranks with it" if len(hosts) == 1 else "hosts {} were lost, and their ranks"
    return Failure(code="HT-host-lost", message=words.format(names), host=names, exit_code=RESUMABLE, lost_hosts=hosts)


def _stop_reason(directory: RunDirectory, records: Mapping[int, RankRecord]) -> str:
    """Why the ranks stopped: because they were asked to, or for the reason that they recorded after losing others."""
    if all(record.status != "lost" for record in records.values()):
        return "stopped as asked"
    with contextlib.suppress(HpctrainError):
        if stops := EventsFile(directory.events).few(StoppedEvent):
            return f"stopped: {stops[-1].reason}"
    return "stopped as asked"


def _raised(directory: RunDirectory, first: RankRecord) -> Failure:
    assert first.error is not None
    cause = f"{first.error.type}: {first.error.message}" if first.error.message else first.error.type
    if _BROKEN_GPU.search(cause):
        failure = _rank_failure(directory, first, "HT-host-gpu-broken", f"failed: {cause}", exit_code=RESUMABLE)
        return replace(failure, lost_hosts=(first.host,))
    # A script may exit with any status; 2 and 4 have their meaning only where hpctrain raised them.
    left = first.error.type == SystemExit.__name__
    known = not left and first.exit_code in (2, RESUMABLE)
    code = first.error.code or ("HT-rank-exit" if left else "HT-rank-exception")
    failure = _rank_failure(directory, first, code, f"failed: {cause}", exit_code=first.exit_code if known else 1)
    return replace(failure, refused=first.error.refused)


def _aborted(directory: RunDirectory, records: Mapping[int, RankRecord], output: str) -> Failure | None:
    """The failure where a rank called MPI_Abort."""
    for match in filter(None, (words.search(output) for words in _ABORTED)):
        if record := records.get(int(match["rank"])):
            ending = f"ended the run by MPI_Abort, with error code {match['code']}"
            exit_code = RESUMABLE if int(match["code"]) == RESUMABLE else 1
            return _rank_failure(directory, record, "HT-rank-exit", ending, exit_code=exit_code)
    return None


def _silent(
    directory: RunDirectory, records: Mapping[int, RankRecord], ranks: int, *, output: str, exit_status: int
) -> Failure:
    """The failure without any recorded error: ranks were lost, perhaps with their host, or none could be started."""
    exit_code = RESUMABLE if records else 1
    lines = tuple(line for line in output.replace("\0", "").splitlines() if line.strip())[-LOG_LINES:]
    silent = [rank for rank in range(ranks) if rank not in records or records[rank].status == "running"]
    if len(silent) == 1 and silent[0] in records and not lines:
        record = records[silent[0]]
        end = "ended before its work was done, without an error"
        return _rank_failure(directory, record, "HT-rank-silent", end, exit_code=exit_code)
    names = ", ".join(f"{rank} on {records[rank].host}" if rank in records else str(rank) for rank in silent)
    no_daemon = None if records else _NO_DAEMON.search(output)
    end = f"mpirun's daemon on {no_daemon['host']} did not report back" if no_daemon else f"rank {names} did not finish"
    how = f"exit status {exit_status}" if exit_status >= 0 else f"ended by {signal_name(-exit_status)}"
    return Failure(
        code="HT-host-no-daemon" if no_daemon else "HT-rank-silent",
        message=f"{end}; {how}",
        host=no_daemon["host"] if no_daemon else None,
        lines=lines,
        exit_code=exit_code,
        passing=not records and bool(no_daemon or _BAD_START.search(output)),
    )


def signal_name(number: int) -> str:
    """The name of a signal, or its number: real-time signals have no name, and a launcher may print any number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class _Killed:
    """A rank that a signal ended according to the launcher; ``by_launcher``: which may itself have sent it;
    ``for_memory``: the launcher says that memory ran out.
    """

    rank: int
    signal: int
    by_launcher: bool
    for_memory: bool = False


def _killed(ranks: int, records: Mapping[int, RankRecord], output: str, exit_status: int) -> _Killed | None:
    """What the launcher says of a rank that was killed; MPICH's launcher may name any rank.

    A rank whose loss the others survived is not the cause.
    """
    if ranks == 1 and exit_status < 0:
        return _Killed(0, -exit_status, by_launcher=exit_status == -signal.SIGTERM)
    for match in (*_OPEN_MPI_SIGNAL.finditer(output), *_INTEL_SIGNAL.finditer(output)):
        rank = int(match["rank"])
        if rank not in records or records[rank].status != "lost":
            number = int(match["signal"])
            return _Killed(rank, number, by_launcher=number == signal.SIGTERM)
    if task := _SRUN_MEMORY.search(output):
        return _Killed(int(task["rank"]), signal.SIGKILL, by_launcher=False, for_memory=True)
    signals = {signal.strsignal(each): int(each) for each in signal.valid_signals()}
    # Of a task that ended by itself it says in the same place that it exited.
    for match in _SRUN_SIGNAL.finditer(output):
        if (by := signals.get(match["name"])) is not None:
            aborted = by == signal.SIGKILL and _SRUN_ABORTED.search(output, 0, match.start())
            return _Killed(int(match["rank"]), by, by_launcher=by == signal.SIGTERM or bool(aborted))
    return None


def _killed_failure(directory: RunDirectory, records: Mapping[int, RankRecord], killed: _Killed) -> Failure:
    rank, by = killed.rank, killed.signal
    code, ending = "HT-rank-killed", f"was killed by signal {by} ({signal_name(by)})"
    if killed.for_memory:
        code, ending = OUT_OF_MEMORY, f"{ending} because memory ran out"
    elif by == signal.SIGKILL:
        ending += ", which is also what the system sends to a process when memory runs out"
    # SIGKILL and SIGTERM come from outside; any other signal is an error of the run itself.
    exit_code = RESUMABLE if by in (signal.SIGKILL, signal.SIGTERM) else 1
    hint = MEMORY_HINT if killed.for_memory else ""
    if rank in records:
        return replace(_rank_failure(directory, records[rank], code, ending, exit_code=exit_code), hint=hint)
    return Failure(code=code, message=f"rank {rank} {ending}", rank=rank, exit_code=exit_code, hint=hint)


def with_memory(failure: Failure, host: str, before: GroupMemory | None, after: GroupMemory | None) -> Failure:
    """The failure with what the kernel says of the memory of this host's job.

    Args:
        before, after: the attempt.
    """
    if after is None or after.kills <= (before.kills if before else 0):
        return failure
    killed = after.kills - (before.kills if before else 0)
    processes = "a process" if killed == 1 else f"{killed} processes"
    said = f"on {host} the kernel killed {processes} because memory ran out: {after}"
    if failure.code in BY_A_SIGNAL and failure.host in (host, None):
        message = failure.message.partition(", which is also")[0]
        return replace(failure, code=OUT_OF_MEMORY, message=f"{message}; {said}", hint=MEMORY_HINT)
    return replace(failure, hint="\n  ".join(filter(None, [failure.hint, said, MEMORY_HINT])))


def with_recordings(failure: Failure, directory: RunDirectory) -> Failure:
    """The failure with the command that compares what PyTorch's flight recorder wrote of the ranks' collectives."""
    prefix = directory.flight_recorder
    if not any(prefix.parent.glob(f"{prefix.name}*")):
        return failure
    command = f"torchfrtrace --allow-incomplete-ranks --prefix {prefix.name} {shell_word(prefix.parent)}"
    said = (
        f"{command} says which rank did not join which collective (a next attempt moves the files into a folder there)"
    )
    return replace(failure, hint="\n  ".join(filter(None, [failure.hint, said])))


def _rank_failure(directory: RunDirectory, record: RankRecord, code: str, ending: str, *, exit_code: int) -> Failure:
    log = directory.log(record.rank)
    return Failure(
        code=code,
        message=f"rank {record.rank} on {record.host} {ending}",
        rank=record.rank,
        host=record.host,
        log=log,
        lines=last_lines(log, LOG_LINES, begin=record.log_begin),
        exit_code=exit_code,
    )
