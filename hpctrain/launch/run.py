"""Starting a plan's ranks, following them, and ending them, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from hpctrain.errors import HpctrainError
from hpctrain.events import Event, EventWriter
from hpctrain.launch.command import Command
from hpctrain.launch.failure import Failure, find_failure
from hpctrain.launch.follow import Follower
from hpctrain.plan import Stop
from hpctrain.records import read_records
from hpctrain.rundir import RunDirectory
from hpctrain.stopping import RESUMABLE

_POLL_SECONDS = 0.1
# One file a rank, perhaps on a shared file system: looked at less often.
_POLLS_A_RECORD = 10
# After one rank failed or died the launcher ends the others by itself; Intel MPI's does not always.
_FAILURE_GRACE_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0
_AGAIN_SECONDS = 1.0
_KILL_SECONDS = 5.0
# The end of the launcher's own output is where it names the rank that died.
_OUTPUT_BYTES = 65536


def launch(
    command: Command,
    directory: RunDirectory,
    ranks: int,
    *,
    start: Event,
    stop: Stop = Stop(),
    stoppable: bool = False,
    show: Callable[[Event], None],
    line: Callable[[str], None],
    notice: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Run a command to its end; no process of it lives when this returns.

    Args:
        command: starts the ranks.
        directory: the run, with its plan.
        ranks: how many ranks have to record that they are done.
        start: what the event ``start`` says.
        stop: how the ranks are stopped.
        stoppable: the ranks stop at any signal; otherwise, as most scripts, at ``stop.signal`` if at all.
        show: gets each event as it happens.
        line: gets each line that rank 0 prints.
        notice: gets what the user has to know of a stop.

    Returns:
        None if every rank is done, else the first cause that is known.
    """
    with EventWriter(directory.events) as events:
        follower = Follower(directory, show, line)
        events.emit("start", **start)
    with Interrupts(stop.signal) as interrupts:
        job = Job(command, directory)
        try:
            cut = job.wait(follower, lambda: bool(interrupts.received))
            waits = cut and (stoppable or interrupts.received[0] == interrupts.stop)
            if waits and _ask(directory, interrupts.received[0], stop.seconds, notice):
                deadline = time.monotonic() + stop.seconds
                cut = job.wait(follower, lambda: interrupts.hurried or time.monotonic() > deadline)
        finally:
            job.stop(interrupts)
        follower.advance(last=True)
    failure = find_failure(directory, ranks, output=job.output(), exit_status=job.process.returncode, lost=job.lost)
    if failure and interrupts.received:
        return _interrupted(failure, interrupts.received[0].name, cut=cut, exit_code=RESUMABLE if waits else 1)
    return failure


def _ask(directory: RunDirectory, by: signal.Signals, seconds: float, notice: Callable[[str], None]) -> bool:
    """Ask the ranks to stop; whether that could be done."""
    try:
        directory.stop.write_text(f"{by.name}\n")
    except OSError as error:
        notice(f"{by.name}: cannot write {directory.stop}: {error.strerror}; every process is ended")
        return False
    notice(
        f"{by.name}: waiting up to {seconds:g} s for the ranks to end their step and save their state; "
        "another signal ends them at once"
    )
    return True


def _interrupted(failure: Failure, by: str, *, cut: bool, exit_code: int) -> Failure:
    """What became of an interrupted run: the ranks left by themselves, or were ended with ``exit_code``."""
    if cut:
        return Failure(message=f"interrupted by {by}; every process was ended", exit_code=exit_code)
    if failure.stopped:
        return replace(failure, message=f"interrupted by {by}; all ranks saved their state and left")
    return failure


class Interrupts:
    """Collects SIGINT, SIGTERM, SIGHUP and one that asks for a stop instead of letting them end this process.

    Args:
        stop: the name of that one, without ``SIG``.
    """

    def __init__(self, stop: str = Stop().signal) -> None:
        self.stop = signal.Signals[f"SIG{stop}"]
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def hurried(self) -> bool:
        """Whether a second signal came. Slurm can deliver its own twice, to the job script and to this process."""
        return any(number != self.stop for number in self.received[1:])

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, self.stop):
            # nohup ignores SIGHUP, and a shell SIGINT of its background jobs: that stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


class Job:
    """The processes of one run, in a session of their own.

    ``lost`` is the rank that was seen dead, without an error recorded, while others lived.
    """

    def __init__(self, command: Command, directory: RunDirectory) -> None:
        self._directory = directory
        self._output = b""
        self.lost: int | None = None
        self.process = subprocess.Popen(
            command.arguments,
            env=command.environment_from(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def wait(self, follower: Follower, enough: Callable[[], bool]) -> bool:
        """Follow until the launcher ends, a rank has failed and the others do not end, or it is enough.

        Returns:
            Whether it was enough, and ranks that had not failed still ran.
        """
        failed_at = None
        turns = itertools.count()
        while self.process.poll() is None:
            if enough():
                return failed_at is None
            follower.advance()
            self.output()
            if failed_at is None and next(turns) % _POLLS_A_RECORD == 0 and self._failed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _FAILURE_GRACE_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        return False

    def output(self) -> str:
        """The end of what the launcher itself has printed up to now."""
        assert self.process.stdout is not None
        while part := self.process.stdout.read():
            self._output = (self._output + part)[-_OUTPUT_BYTES:]
        return self._output.decode(errors="replace")

    def stop(self, interrupts: Interrupts) -> None:
        """End every process that still lives: politely, then, or at a second interrupt, by force."""
        members = self._members()
        interrupted = len(interrupts.received)
        self._signal(members, signal.SIGTERM)
        begin = time.monotonic()
        deadline, again = begin + _TERMINATE_SECONDS, begin + _AGAIN_SECONDS
        while time.monotonic() < deadline and len(interrupts.received) == interrupted:
            self.output()
            _, members = psutil.wait_procs(members, timeout=_POLL_SECONDS)
            if not members and self.process.poll() is not None:
                break
            if time.monotonic() > again:
                # A rank takes the first one as the wish to end its step. Not the launcher: Open MPI's gives up its
                # ranks at the second.
                again = deadline
                _send(members, signal.SIGTERM)
        # Again from the start: a launcher may have been starting ranks when it got the signal.
        members = [*members, *self._members()]
        self._signal(members, signal.SIGKILL)
        psutil.wait_procs(members, timeout=_KILL_SECONDS)
        self.process.wait()

    def _signal(self, members: list[psutil.Process], number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        _send(members, number)

    def _failed(self) -> bool:
        records = read_records(self._directory).values()
        if any(record.status == "failed" for record in records):
            return True
        dead = [record.rank for record in records if record.lost]
        # All of them are dead when the launcher has ended the job, which says nothing of the first.
        if dead and len(dead) < len(records):
            self.lost = dead[0]
        return bool(dead)

    def _members(self) -> list[psutil.Process]:
        """The launcher's descendants, the members of its session, and the ranks, which may have outlived it."""
        members: set[psutil.Process] = set()
        # A damaged record must not let the other processes live.
        with contextlib.suppress(HpctrainError):
            recorded = [record.process() for record in read_records(self._directory).values()]
            members.update(process for process in recorded if process)
        if self.process.poll() is None:
            members.update(psutil.Process(self.process.pid).children(recursive=True))
        # The number of a launcher that has ended belongs to nobody else while a process of its session lives.
        if self.process.poll() is None or not psutil.pid_exists(self.process.pid):
            members.update(process for process in psutil.process_iter() if _session(process) == self.process.pid)
        return [process for process in members if process.pid != self.process.pid]


def _send(members: list[psutil.Process], number: signal.Signals) -> None:
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(number)


def _session(process: psutil.Process) -> int | None:
    """The session of a process that runs; None where it has ended."""
    try:
        session = os.getsid(process.pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
