"""The state of another process of this host, and the Python stack of its main thread, which it writes on request.

A signal asks for it, so that a process answers whose interpreter's lock is held by an extension. Its other threads are
left out: ``faulthandler`` reading all threads from a signal handler has crashed the process that it looked at, because
their frames change meanwhile.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import platform
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# A high real-time signal, which no library in use here takes: MPI libraries and debuggers use low ones.
STACK_SIGNAL = signal.SIGRTMAX - 3

_ANSWER_SECONDS = 1.5
_STEADY_SECONDS = 0.05
# The number of the system call that sends a signal to one thread, which Python has for its own process alone.
_TGKILL = {"x86_64": 234, "aarch64": 131}
_STACK_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process with the file to which it writes its stack, which also proves its identity.

    Attributes:
        descriptor: the file's descriptor in that process; None if it writes no stack.
        signalled: whether it answers :data:`STACK_SIGNAL`.
    """

    pid: int
    descriptor: int | None = None
    device: int = 0
    inode: int = 0
    signalled: bool = False

    @property
    def file(self) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    def lives(self) -> bool:
        """Whether the process can be seen from here, and its number does not belong to another one by now."""
        try:
            found = self.file.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


class StackFile:
    """Lets this process write the stack of its main thread to a nameless file when another asks for it.

    The signal is left alone where the program uses it, and outside of the main thread, which alone may set handlers.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("hpctrain-stacks")
        signalled = (
            signal.getsignal(STACK_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
            and threading.current_thread() is threading.main_thread()
        )
        if signalled:
            # faulthandler restores this handler at its end: a signal that comes too late must not end the process.
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
            faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=False)
        found = os.fstat(self._file)
        self.process = Process(
            pid=os.getpid(), descriptor=self._file, device=found.st_dev, inode=found.st_ino, signalled=signalled
        )

    def close(self) -> None:
        """Stop answering. Idempotent; does nothing in a fork, which shares the file with its parent."""
        if self._file < 0 or os.getpid() != self.process.pid:
            return
        if self.process.signalled:
            faulthandler.unregister(STACK_SIGNAL)
        os.close(self._file)
        self._file = -1


def look_at(process: Process) -> tuple[str, str]:
    """The state of a process of this host as text, and its main thread's Python stack; "" without one."""
    if process.descriptor is None or not process.lives():
        return "state unknown: its process cannot be seen", ""
    state = _state(process.pid)
    # A stopped process cannot answer.
    asked = process.signalled and not state.startswith(("T", "t"))
    return state, _stack(process) if asked else ""


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
        _ask(process.pid)
        _wait_for_answer(process, before)
        with process.file.open("rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[:_STACK_LINES])


def _ask(pid: int) -> None:
    """Send the signal to the main thread: another one would write its own stack."""
    number = _TGKILL.get(platform.machine())
    if number is None:
        os.kill(pid, STACK_SIGNAL)
    else:
        ctypes.CDLL(None).syscall(number, pid, pid, int(STACK_SIGNAL))


def _wait_for_answer(process: Process, before: int) -> None:
    """Wait until the file has grown, and has stopped growing, within the time for an answer."""
    end = time.monotonic() + _ANSWER_SECONDS
    size, last = before, -1
    while time.monotonic() < end and (size == before or size != last):
        time.sleep(_STEADY_SECONDS)
        size, last = process.file.stat().st_size, size
