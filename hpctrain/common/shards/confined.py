"""Calls functions in a process of their own, where a library that crashes or hangs on somebody's file takes only that.

``python -m hpctrain.common.shards.confined SOCKET NOTES`` is that process; the arguments are the numbers of inherited
files.
"""

from __future__ import annotations

import atexit
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards import bounded
from hpctrain.common.shards.bounded import BeyondLimitsError, Notes

_Result = TypeVar("_Result")
_LOOK_SECONDS = 1.0
# The wall-clock limit as a multiple of the processor time, since reading also waits for disks and cores.
_WAITING_TIMES = 10
# Signals that a process's own fault raises; the system or a user sends others.
_FAULTS = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
)


def call_confined(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """What a function of a module returns or raises in another process. For several threads at a time.

    Raises:
        BeyondLimitsError: the process ended, or did not go on, at what the function read within its limits.
        HpctrainError: the process ended by something else.
    """
    try:
        process = _idle.pop()
    except IndexError:
        process = _Process()
    _busy.append(process)
    try:
        done, result = process.call(function, arguments)
    except BaseException:
        process.end()
        raise
    finally:
        _busy.remove(process)
    _idle.append(process)
    if not done:
        raise result
    returned: _Result = result
    return returned


@atexit.register
def end_all() -> None:
    """End all of these processes; calls that wait for one raise."""
    for process in [*_busy, *_idle]:
        process.kill()
    _idle.clear()


class _Process:
    """A process that was started for such calls. It ends with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._notes = Notes(os.memfd_create("hpctrain-notes"))
        self._connection = Connection(ours.detach())
        files = (theirs.fileno(), self._notes.file)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=files,
                # The process must find the functions where this one does.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # A session of its own, so that signals to the ranks do not reach it.
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            raise HpctrainError(
                "HT-process-cannot-start",
                "cannot start a process: {problem}",
                "ulimit -a shows the limits",
                exit_code=1,
                problem=str(error),
            ) from error
        finally:
            theirs.close()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether the function returned, and what it returned or raised."""
        folder = str(Path.cwd())
        try:
            self._connection.send((folder, function, arguments))
            self._wait()
            answer: tuple[bool, Any] = self._connection.recv()
            return answer
        except (EOFError, OSError):
            # multiprocessing raises a plain OSError for an answer that breaks off. The process is of no use then; one
            # that is ending keeps its status.
            self._process.kill()
            raise self._ended() from None

    def end(self) -> None:
        """End it, whatever it does, and its connection."""
        self.kill()
        self._close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        self._connection.close()
        os.close(self._notes.file)

    def _wait(self) -> None:
        """Until there is an answer, or an end; what is outside of limits has none."""
        noted, since = self._notes.read(), time.monotonic()
        while not self._connection.poll(_LOOK_SECONDS):
            before, noted = noted, self._notes.read()
            if noted != before:
                since = time.monotonic()
            _, seconds, what = noted
            if what and time.monotonic() - since > _WAITING_TIMES * seconds:
                raise BeyondLimitsError(what, f"reading it takes more than {_WAITING_TIMES * seconds:.0f} s")

    def _ended(self) -> HpctrainError:
        status = -self._process.wait()
        _, seconds, what = self._notes.read()
        if what and status == signal.SIGXCPU:
            return BeyondLimitsError(what, f"reading it takes more than {seconds:.0f} s of processor time")
        if what and status in _FAULTS:
            how = f"its library crashed on it ({signal.Signals(status).name})"
            # A Rust library without memory aborts, which looks like any other abort.
            return BeyondLimitsError(what, how + ", or had too little memory" * (status == signal.SIGABRT))
        how = signal.Signals(status).name if status > 0 else f"status {-status}"
        return HpctrainError(
            "HT-process-killed",
            "a process that makes shards was ended from outside ({how}), as happens when memory runs out{place}",
            "the same command continues; with fewer processes if memory ran short",
            exit_code=1,
            how=how,
            place=f", while it read {what}" if what else "",
        )


# Idle processes of this process; its forks have none of them.
_idle: list[_Process] = []
_busy: list[_Process] = []
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_busy.clear)


def _serve(connection: Connection) -> None:
    calls: queue.SimpleQueue[tuple[str, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    while True:
        folder, function, arguments = calls.get()
        try:
            os.chdir(folder)
            answer = (True, function(*arguments))
        except BaseException as error:
            if not isinstance(error, HpctrainError):
                error.add_note(traceback.format_exc())
            answer = (False, error)
        connection.send(answer)


def _receive(connection: Connection, calls: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            calls.put(connection.recv())
    finally:
        # The calling process is gone, so nobody waits for the result.
        os._exit(1)


def main(connection: str, notes: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    bounded.notes = Notes(int(notes))
    # Libraries print the faults they find, which the answer reports anyway.
    os.dup2(1, 2)
    _serve(Connection(int(connection)))


if __name__ == "__main__":
    main(*sys.argv[1:])
