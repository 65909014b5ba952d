"""Processes of a faulted run: started, watched to a moment, hurt, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import read_records

if TYPE_CHECKING:
    from support.hosts.local_hosts import LocalHosts

BIN = Path(sys.executable).parent
INJECTED = Path(__file__).parent / "injected"
# Every process of a case inherits it, whatever session it goes to.
_MARK = "HPCTRAIN_FAULTS"
_POLL_SECONDS = 0.005
# What a launcher started may be a moment after it.
_LEAVE_SECONDS = 20.0
_KILL_SECONDS = 30.0
# They serve connections, and those that nobody could say goodbye on end when TCP gives up, after minutes.
_SERVERS = ("sshd", "prted")


class OutOfTimeError(Exception):
    """What was waited for did not come."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended. ``code`` is None where it had to be ended, and ``printed`` holds both of its streams.

    ``began`` says whether there is a run; ``left`` are its processes, and its files in shared memory, that were still
    there a moment later.
    """

    code: int | None
    printed: str
    began: bool = True
    left: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Place:
    """The folder of one case, with all that is started and mounted in it.

    Attributes:
        folder: holds ``run``, the run directory.
        limit: seconds for each command, and for each moment that is waited for.
        undone: what is done in the case besides, and undone at its end, the last first.
        hosts: all of its processes are there, started from the first; None where this machine is the host.
    """

    folder: Path
    limit: float
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    undone: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    hosts: LocalHosts | None = None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.folder / "run")

    def processes(self) -> list[psutil.Process]:
        """All that live of this case."""
        if self.hosts:
            return [process for process in self.hosts.processes(*self.hosts.names) if _name(process) not in _SERVERS]
        marked = f"{_MARK}={self.mark}".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if marked in variables and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def mount(self, path: Path, *arguments: str) -> Callable[[], None]:
        """Mount something on ``path`` until the end of the case, or until what is returned is called."""
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments, str(path)], check=True, capture_output=True, text=True)
        mounted = self.undone.enter_context(contextlib.ExitStack())
        unmount = ["umount", "--lazy", str(path)]
        mounted.callback(subprocess.run, unmount, check=True, capture_output=True)
        return mounted.close

    def close(self) -> None:
        """End and remove everything."""
        try:
            self.kill_all()
        finally:
            self.undone.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill_all(self) -> None:
        """End every process of this case at once. Not waited for as children: who started them asks how they ended."""
        deadline = time.monotonic() + _KILL_SECONDS
        # Again until there are none: one may have been starting another.
        while processes := self.processes():
            assert time.monotonic() < deadline, f"killed for {_KILL_SECONDS:g} s, and still there: {processes}"
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)

    def begin(self, *arguments: str, injected: Sequence[dict[str, Any]] = (), **variables: str) -> Training:
        """``hpctrain run ARGUMENTS --run-dir run``, in a session of its own.

        What is to meet a fault has something ``injected``, at least its pace.
        """
        inherited = dict(os.environ)
        if injected:
            # What is done to a rank is done to a process of its own, which no other process stands for.
            inherited.pop("HPCTRAIN_WARM_INTERPRETERS", None)
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(INJECTED), inherited.get("PYTHONPATH")))),
            "HPCTRAIN_INJECTED": json.dumps(list(injected)),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            _MARK: self.mark,
            **variables,
        }
        words = [str(BIN / "hpctrain"), "run", *arguments, "--run-dir", "run"]
        if self.hosts:
            words = self.hosts.command(self.hosts.names[0], *words, cwd=self.folder, **own)
        output = (self.folder / "output").open("w+b")
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env={**inherited, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hears_interrupts,
        )
        return Training(self, process, output, arguments)


def _hears_interrupts() -> None:
    """A shell lets its background jobs ignore them, and what they start too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Training:
    """One start of a run.

    ``arguments`` are those of its command. ``since`` is the moment of the fault, by ``time.monotonic``, where that is
    known, and ``leave`` how many seconds after it all processes have to be gone.
    """

    def __init__(self, place: Place, process: subprocess.Popen[bytes], output: Any, arguments: tuple[str, ...]) -> None:
        self.place = place
        self.process = process
        self.arguments = arguments
        self.since: float | None = None
        self.leave = 0.0
        self._output = output
        self._before = self.steps()
        self._shared: set[Path] | None = None

    def steps(self) -> int:
        """How many are recorded, those that were lost and done again included."""
        events = self.place.directory.events
        return events.read_bytes().count(b'"event": "step"') if events.exists() else 0

    def newest(self) -> int:
        """The number of the newest step that is recorded."""
        lines = self.place.directory.events.read_bytes().splitlines(keepends=True)
        steps = (line for line in reversed(lines) if b'"event": "step"' in line and line.endswith(b"\n"))
        return int(json.loads(next(steps, b'{"iteration": 0}'))["iteration"])

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll.

        Raises:
            OutOfTimeError: the run ended meanwhile, or the limit did.
        """
        deadline = time.monotonic() + self.place.limit
        while not condition():
            if self.process.poll() is not None:
                raise OutOfTimeError(f"the run ended ahead of {what}: {self.printed()[-1500:]}")
            if time.monotonic() > deadline:
                raise OutOfTimeError(f"{what} did not come in {self.place.limit:g} s: {self.printed()[-1500:]}")
            time.sleep(_POLL_SECONDS)

    def wait_for_step(self, number: int, delay: float = 0.0) -> None:
        """Until this start has done so many steps, and a moment longer."""
        if self._shared is None:
            # All is allocated by then, and a look at it takes longer than a moment.
            self.wait_until("its first step", lambda: self.steps() > self._before)
            self._shared = set(_shared_files(self.place.processes()))
        self.wait_until(f"step {number}", lambda: self.steps() - self._before >= number)
        time.sleep(delay)

    def wait_for_writing(self, delay: float = 0.0) -> None:
        """Until a checkpoint is being written, and a moment longer."""
        checkpoints = self.place.directory.checkpoints
        self.wait_until("the writing of a checkpoint", lambda: any(checkpoints.glob(".step-*")))
        time.sleep(delay)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks."""
        return {
            record.rank: process
            for record in read_records(self.place.directory).values()
            if (process := record.process()) is not None
        }

    def send(self, number: int, rank: int | None = None) -> None:
        """A signal to a rank, or to the launcher."""
        os.kill(self.process.pid if rank is None else self.ranks()[rank].pid, number)

    def printed(self) -> str:
        return (self.place.folder / "output").read_text(errors="replace")

    def end(self) -> Ended:
        """Wait for the end of the command; what outlives it is told and left as it is."""
        try:
            code: int | None = self.process.wait(timeout=self.place.limit)
        except subprocess.TimeoutExpired:
            code = None
        printed = self.printed()
        if code is None:
            self.place.kill_all()
            self.process.wait()
        self._output.close()
        began = self.place.directory.plan.exists()
        return Ended(code=code, printed=printed, began=began, left=tuple(self._left()))

    def _left(self) -> Iterator[str]:
        deadline = max(time.monotonic() + _LEAVE_SECONDS, (self.since or 0.0) + self.leave)
        while (processes := self.place.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
        for path in sorted(self._shared or ()):
            if path.exists():
                yield str(path)
                path.unlink()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _shared_files(processes: list[psutil.Process]) -> Iterator[Path]:
    """What they map of /dev/shm; a file that is removed while it is mapped is nobody's to clear away."""
    for process in processes:
        with contextlib.suppress(OSError, psutil.Error):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, found, name = line.partition("/dev/shm/")
                if found and not name.endswith(" (deleted)"):
                    yield Path("/dev/shm", name)
