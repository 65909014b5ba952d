"""What is reported of a rank that others wait for: the state of its process, and its Python stack in its own log.

A signal asks a process of the same host for the stack, so that it answers even where an extension holds the
interpreter's lock. Its other threads are left out: ``faulthandler`` reading all threads from a signal handler has
crashed the process that it looked at, because their frames change meanwhile.
"""

from __future__ import annotations

import ctypes
import faulthandler
import platform
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events.kinds import SlowRankEvent, StallEvent
from hpctrain.common.run.records import living_process
from hpctrain.common.stderr import tell

# A high real-time signal, which no library in use here takes: MPI libraries and debuggers use low ones.
STACK_SIGNAL = signal.SIGRTMAX - 3
# The number of the system call that sends a signal to one thread, which Python has for its own process alone.
_TGKILL = {"x86_64": 234, "aarch64": 131}
# Stopped processes cannot answer.
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(kw_only=True)
class Reports:
    """The functions by which the training program reports a stall and ends; it sets them before the ranks meet.

    Attributes:
        iteration: gives the number of the step in progress, None if unknown.
        record: records a stall that this rank has to report; called by the watching thread.
        slow: records a rank that is slower than the others, on rank 0; by default it is printed.
        give_up: ends a rank that hangs inside an MPI call at the last limit, and does not return; None for printing
            the error and aborting the run. Called by the watching thread.
    """

    iteration: Callable[[], int | None] = lambda: None
    record: Callable[[StallEvent], None] = lambda stall: None
    slow: Callable[[SlowRankEvent], None] = lambda event: tell(f"hpctrain: {event.text}")
    give_up: Callable[[HpctrainError], None] | None = None


reports = Reports()


def answer_requests() -> None:
    """Let this process write the stack of its main thread to its stderr when another asks for it. Idempotent.

    The signal is left alone where the program uses it, and outside of the main thread, which alone may set handlers.
    """
    free = signal.getsignal(STACK_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    if free and threading.current_thread() is threading.main_thread():
        # Ranks that meet anew call this again, and faulthandler would not set again what it believes to be set.
        faulthandler.unregister(STACK_SIGNAL)
        # faulthandler restores this handler at its end: a signal that comes too late must not end the process.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=False)


def request_stack(host: str, pid: int, started: float) -> str:
    """Ask a process of this host to write its stack to its log, unless it is stopped; returns its state as text."""
    unknown = "state unknown: its process cannot be seen"
    try:
        process = living_process(host, pid, started)
        state: str = process.status() if process else unknown
        call = _TGKILL.get(platform.machine())
        if call is None or state in (unknown, *_STOPPED) or not _catches(pid):
            return state
        # To the main thread: another one would write its own stack.
        ctypes.CDLL(None).syscall(call, pid, pid, int(STACK_SIGNAL))
    except (psutil.Error, OSError):  # it has ended meanwhile
        return unknown
    return f"{state}; its log says where it is in Python"


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal, which ends one that has none."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(caught and int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
