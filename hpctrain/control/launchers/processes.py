"""Ends a launcher, and all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import read_records

_POLL_SECONDS = 0.1
_TERMINATE_SECONDS = 10.0
_AGAIN_SECONDS = 1.0
_KILL_SECONDS = 5.0


def end_processes(
    launcher: subprocess.Popen[bytes],
    directory: RunDirectory,
    hurry: Callable[[], bool] = lambda: False,
    poll: Callable[[], object] = lambda: None,
) -> None:
    """End a launcher and all that it started: with SIGTERM first, and after a time, or in a hurry, with SIGKILL.

    Args:
        directory: its records name ranks that may have outlived the launcher.
        poll: is called again and again while they end.
    """
    members = _members(launcher, directory)
    _signal(launcher, members, signal.SIGTERM)
    begin = time.monotonic()
    deadline, again = begin + _TERMINATE_SECONDS, begin + _AGAIN_SECONDS
    while time.monotonic() < deadline and not hurry():
        poll()
        _, members = psutil.wait_procs(members, timeout=_POLL_SECONDS)
        if not members and launcher.poll() is not None:
            break
        if time.monotonic() > again:
            # A rank takes the first SIGTERM as a request to end its step. Only ranks get a second one: at the second,
            # Open MPI's launcher abandons its ranks.
            again = deadline
            _send_all(members, signal.SIGTERM)
    # Again from the start: a launcher may have been starting ranks when it got the signal.
    members = [*members, *_members(launcher, directory)]
    _signal(launcher, members, signal.SIGKILL)
    psutil.wait_procs(members, timeout=_KILL_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_KILL_SECONDS)


def _members(launcher: subprocess.Popen[bytes], directory: RunDirectory) -> list[psutil.Process]:
    """The launcher's descendants, the members of its session, and the ranks, which may have outlived it."""
    # A damaged record must not spare the other processes, and a forged one must not end any.
    recorded = (record.own_process(directory) for record in read_records(directory).values())
    members = {process for process in recorded if process}
    with contextlib.suppress(psutil.NoSuchProcess):
        members.update(psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else ())
    # The process number of an ended launcher is not reused while a process of its session lives.
    if launcher.poll() is None or not psutil.pid_exists(launcher.pid):
        members.update(process for process in psutil.process_iter() if _session(process) == launcher.pid)
    return [process for process in members if process.pid != launcher.pid]


def _signal(launcher: subprocess.Popen[bytes], members: Sequence[psutil.Process], number: signal.Signals) -> None:
    if launcher.poll() is None:
        os.killpg(launcher.pid, number)
    _send_all(members, number)


def _send_all(members: Sequence[psutil.Process], number: signal.Signals) -> None:
    for member in members:
        # A script can have started what runs as another user, as sudo does: that ends by itself, or not at all.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            member.send_signal(number)


def _session(process: psutil.Process) -> int | None:
    """The session of a process that runs; None where it has ended."""
    try:
        session = os.getsid(process.pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
