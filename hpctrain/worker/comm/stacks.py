"""The state of another process of this host, and its Python stacks, which it writes on request.

A thread of the process answers, holding the interpreter's lock: without it the frames of running threads change during
the reading, and ``faulthandler`` reading all threads from a signal handler has crashed the process that it looked at.
Where an extension keeps the lock, a signal makes the main thread write its own stack, which cannot change meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A high real-time signal, which no library in use here takes: MPI libraries and debuggers use low ones.
STACK_SIGNAL = signal.SIGRTMAX - 3

_ASK, _STOP = b"?", b"."
# Generous, because busy threads hand the interpreter's lock to each other before the answering thread gets it.
_ANSWER_SECONDS = 1.5
_STEADY_SECONDS = 0.05
_STACK_LINES = 60
# This module's own thread, and the one that watches the waits (hpctrain.worker.comm.stalls).
_WATCHERS = ("hpctrain-stacks", "hpctrain-stalls")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process with the file to which it writes its stacks, which also proves its identity.

    Attributes:
        descriptor: the file's descriptor in that process; None if it writes no stacks.
        requests: the descriptor, in that process, of the pipe that takes requests.
        signalled: whether it also answers :data:`STACK_SIGNAL`.
    """

    pid: int
    descriptor: int | None = None
    device: int = 0
    inode: int = 0
    requests: int = -1
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
    """Lets this process write its Python stacks to a nameless file when another asks for them.

    The signal is left alone where the program uses it, and outside of the main thread, which alone may set handlers.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("hpctrain-stacks")
        self._requests, requests = os.pipe()
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
            pid=os.getpid(),
            descriptor=self._file,
            device=found.st_dev,
            inode=found.st_ino,
            requests=requests,
            signalled=signalled,
        )
        self._thread = threading.Thread(target=self._answer, name="hpctrain-stacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Idempotent; does nothing in a fork, which shares its descriptors with its parent."""
        if not self._thread.is_alive() or os.getpid() != self.process.pid:
            return
        os.write(self.process.requests, _STOP)
        self._thread.join()
        if self.process.signalled:
            faulthandler.unregister(STACK_SIGNAL)
        for descriptor in (self._file, self._requests, self.process.requests):
            os.close(descriptor)

    def _answer(self) -> None:
        while os.read(self._requests, 1) == _ASK:
            os.write(self._file, "\n\n".join(_stacks()).encode(errors="replace"))


def _stacks() -> Iterator[str]:
    """The stack of each thread of this process, the main one first, without the threads that watch."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    for thread in threads:
        if thread.name in _WATCHERS or thread.ident not in frames:
            continue
        # Not traceback.extract_stack, which reads source files, perhaps from a disk that hangs.
        calls = ((frame.f_code, line) for frame, line in traceback.walk_stack(frames[thread.ident]))
        lines = (f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in calls)
        yield "\n".join([f"Thread {thread.name} (most recent call first):", *lines])


def look_at(process: Process) -> tuple[str, str]:
    """The state of a process of this host as text, and its Python stacks, main thread first; "" without any."""
    if process.descriptor is None or not process.lives():
        return "state unknown: its process cannot be seen", ""
    state = _state(process.pid)
    # A stopped process cannot answer.
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
        _ask(process)
        if not _answered(process, before) and process.signalled:
            os.kill(process.pid, STACK_SIGNAL)
            _answered(process, before)
        with process.file.open("rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[:_STACK_LINES])


def _ask(process: Process) -> None:
    pipe = os.open(f"/proc/{process.pid}/fd/{process.requests}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, _ASK)
    finally:
        os.close(pipe)


def _answered(process: Process, before: int) -> bool:
    """Whether the file has grown, and has stopped growing, within the time for an answer."""
    end = time.monotonic() + _ANSWER_SECONDS
    size, last = before, -1
    while time.monotonic() < end and (size == before or size != last):
        time.sleep(_STEADY_SECONDS)
        size, last = process.file.stat().st_size, size
    return size != before
