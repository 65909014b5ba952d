"""The state of another process of this host, and its Python stack, which it writes when it gets a signal.

The stack comes from ``faulthandler``, whose handler is C code that needs no lock of the interpreter, so it also answers
in the middle of an extension's call.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# High among the real-time signals, which no library in use here takes; the MPI libraries and debuggers use low ones.
STACK_SIGNAL = signal.SIGRTMAX - 3

_ANSWER_SECONDS = 0.5
_STEADY_SECONDS = 0.05
_STACK_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process and the file to which it writes its stack, if it can; the file also proves its identity."""

    pid: int
    descriptor: int | None = None
    device: int = 0
    inode: int = 0

    @property
    def file(self) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    def lives(self) -> bool:
        """Whether the process is there, seen from here, and is not another that got its number."""
        try:
            found = self.file.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class StackFile:
    """Lets this process write its Python stack to a nameless file when it gets :data:`STACK_SIGNAL`.

    Not where the program uses that signal, or where this is not the main thread, which alone may choose handlers.
    """

    def __init__(self) -> None:
        self.process = Process(pid=os.getpid())
        self._file: int | None = None
        in_use = signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN)
        if in_use or threading.current_thread() is not threading.main_thread():
            return
        # What faulthandler puts back in the end: a signal that comes too late must not end the process.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        self._file = os.memfd_create("hpctrain-stack")
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True)
        found = os.fstat(self._file)
        self.process = Process(pid=os.getpid(), descriptor=self._file, device=found.st_dev, inode=found.st_ino)

    def close(self) -> None:
        if self._file is not None:
            faulthandler.unregister(STACK_SIGNAL)
            os.close(self._file)
            self._file = None


def look_at(process: Process) -> tuple[str, str]:
    """The state of a process of this host as text, and its Python stack, main thread first; "" if there is none."""
    if process.descriptor is None or not process.lives():
        return "state unknown: its process cannot be seen", ""
    state = _state(process.pid)
    # A stopped process would answer only when it goes on.
    return state, "" if state.startswith(("T", "t")) else _stack(process)


def _state(pid: int) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "state unknown: its process cannot be seen"
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    state = fields.get("State", "unknown").strip()
    swapped = int(fields.get("VmSwap", "0 kB").split()[0])
    return f"{state}, {swapped / 1024:.0f} MiB of it swapped out" if swapped else state


def _stack(process: Process) -> str:
    try:
        before = process.file.stat().st_size
        os.kill(process.pid, STACK_SIGNAL)
        end = time.monotonic() + _ANSWER_SECONDS
        size, last = before, -1
        while time.monotonic() < end and (size == before or size != last):
            time.sleep(_STEADY_SECONDS)
            size, last = process.file.stat().st_size, size
        with process.file.open("rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    threads = [thread.strip() for thread in text.split("\n\n") if "in _watch_waits" not in thread]
    # The interpreter lists its newest thread first.
    lines = "\n".join(reversed(threads)).splitlines()
    return "\n".join(lines[:_STACK_LINES])
