"""Starts the processes that feed trackers during a run, or send a recorded one later, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.recipes.tracking import Tracker, parse_trackers
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.supervision.repeats import read_series
from hpctrain.control.supervision.trackers import require_trackers

# How long trackers may take at the end of a run. A request to a server that hangs takes 10 s; what writes files on this
# machine ends by itself, but its start alone takes seconds where all cores are busy.
_SERVER_SECONDS = 15.0
_FILES_SECONDS = 60.0
# From then on the user is told what the command waits for.
_SILENT_SECONDS = 5.0
# A server's refusal ends the sending of a recorded run at once; this limit is for a slow server and a long run.
_LATER_SECONDS = 1800.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.1


class TrackerProcess:
    """The process that sends a run to one tracker. When its input ends, it sends the rest and exits.

    Args:
        notice: prints a message for the user.

    Attributes:
        end_seconds: how long it may take when the run has ended.
    """

    def __init__(self, name: Tracker, directory: RunDirectory, notice: Callable[[str], None]) -> None:
        self._name = name
        self.end_seconds = _SERVER_SECONDS if name == "mlflow" else _FILES_SECONDS
        self._directory = directory
        self._notice = notice
        self._text = b""
        command = [sys.executable, "-P", "-m", "hpctrain.report.tracking", name, str(directory.path.absolute())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # W&B's files are uploaded by the user alone, so no process gets the key.
            env={name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"},
            # Ctrl-C must not reach it, so that it can send the ranks' last steps.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def look(self) -> None:
        """Pass on what the process has printed since the last call."""
        assert self._process.stdout is not None
        while part := self._process.stdout.read():
            self._text += part
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            self._notice(f"{self._name}: {line.decode(errors='replace')}")

    def end_input(self) -> None:
        """Tell the process that the run has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, seconds: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Let it send the rest for so many seconds, or until it is ``over``; returns whether the tracker has all."""
        self.end_input()
        began = time.monotonic()
        said = False
        while self._process.poll() is None and (waited := time.monotonic() - began) < seconds and not over():
            self.look()
            if waited > _SILENT_SECONDS and not said:
                said = True
                self._notice(f"waiting for {self._name} to take the rest of this run, {seconds:.0f} s at most")
            time.sleep(_POLL_SECONDS)
        if self._process.poll() is None:
            # The group includes the processes that its library started.
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
        self.look()
        if self._process.returncode == 0:
            return True
        place = shell_word(self._directory.path)
        self._notice(
            f"{self._name} does not have all of this run; what is missing is sent by: "
            f"hpctrain report {place} --tracking {self._name}"
        )
        return False


class Trackers:
    """The processes that feed a run's trackers.

    Args:
        over: whether their end, which began at this time, has to be over.
    """

    def __init__(self, processes: Sequence[TrackerProcess], over: Callable[[float], bool]) -> None:
        self._processes = processes
        self._over = over

    def look(self) -> None:
        """Pass on what they have printed since the last call."""
        for process in self._processes:
            process.look()

    def close(self) -> None:
        """Let them send the rest, all at the same time."""
        began = time.monotonic()
        for process in self._processes:
            process.end_input()
        for process in self._processes:
            process.close(began + process.end_seconds - time.monotonic(), lambda: self._over(began))


@contextlib.contextmanager
def tracked(
    names: Sequence[Tracker],
    directory: RunDirectory,
    notice: Callable[[str], None],
    over: Callable[[float], bool] = lambda began: False,
) -> Iterator[Trackers]:
    """Feed these trackers while the block runs."""
    processes: list[TrackerProcess] = []
    for name in names:
        try:
            processes.append(TrackerProcess(name, directory, notice))
        except OSError as error:
            notice(f"warning: {name} gets nothing from this run: its process cannot be started: {error.strerror}")

    trackers = Trackers(processes, over)
    try:
        yield trackers
    finally:
        trackers.close()


def send_later(run_dir: Path, names: str, notice: Callable[[str], None]) -> int:
    """Send what trackers do not have yet of a run or a series; returns the exit status: 0 if they now have all, else 1.

    Args:
        names: the trackers' names, with commas between them.
        notice: prints a message for the user.

    Raises:
        HpctrainError: an unknown name, no run, or a tracker's package or address is missing.
    """
    trackers = parse_trackers(names)
    require_trackers(trackers)
    series = read_series(run_dir)
    runs = [run for run in series.runs.values() if run.events.exists()] if series else [RunDirectory(run_dir)]
    for run in runs:
        if not run.events.exists():
            raise HpctrainError("HT-run-no-events", "{path} holds no events", "is this a run directory?", path=run_dir)
    sent = True
    for run in runs:
        for process in [TrackerProcess(name, run, notice) for name in trackers]:
            sent &= process.close(_LATER_SECONDS)
    return 0 if sent else 1
