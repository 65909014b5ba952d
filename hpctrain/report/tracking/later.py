"""Sends recorded runs to trackers that were down, or that the run did not name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.tracking import Tracker, parse_trackers
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.resuming.attempts import hold
from hpctrain.control.supervision.repeats import read_series
from hpctrain.control.supervision.trackers import require_trackers
from hpctrain.report.tracking.processes import TrackerProcess

# A server's refusal ends the sending at once; this limit is for a slow server and a long run.
_LIMIT_SECONDS = 1800.0


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
            raise HpctrainError(f"{run_dir} holds no events", "is this a run directory?")
    # A list, so that a failure does not keep the other runs from being sent.
    sent = [_send(run, trackers, notice) for run in runs]
    return 0 if all(sent) else 1


def _send(run: RunDirectory, trackers: Sequence[Tracker], notice: Callable[[str], None]) -> bool:
    sent = [_write_tensorboard(run, notice)] if "tensorboard" in trackers else []
    processes = [TrackerProcess(name, run, notice) for name in trackers if name != "tensorboard"]
    sent += [process.close(_LIMIT_SECONDS) for process in processes]
    return all(sent)


def _write_tensorboard(run: RunDirectory, notice: Callable[[str], None]) -> bool:
    # Imported here, because TensorBoard is of another extra than the other trackers.
    from hpctrain.report.tensorboard import write_tensorboard

    try:
        # The lock keeps the run from being resumed meanwhile: two writers would corrupt the file.
        with hold(run):
            write_tensorboard(run)
    except HpctrainError as error:
        notice(f"tensorboard: {error}")
        return False
    return True
