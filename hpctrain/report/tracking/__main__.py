"""``python -m hpctrain.report.tracking NAME RUN_DIR``: sends a run's events to a tracker until its input ends.

Started by :mod:`hpctrain.report.tracking.processes`, whose end, even by a kill, ends the input. Prints messages for the
user, a line each. Exits with 0 if the tracker has everything.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.recipes.tracking import Tracker, parse_trackers
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.supervision.trackers import MLFLOW_SERVER
from hpctrain.report.tracking.following import Tracking, follow
from hpctrain.report.tracking.progress import only_sender
from hpctrain.report.tracking.redaction import secrets, without

# Characters of a library's message, whose beginning says what is wrong.
_LONGEST = 300
# The ranks on this machine go first.
_NICENESS = 10


class _OwnOutput:
    """Writes lines to the standard output. The libraries print into the null device, because they print addresses."""

    def __init__(self) -> None:
        self._hidden = secrets(os.environ, os.environ.get(MLFLOW_SERVER))
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())

    def say(self, text: str) -> None:
        # The launcher that reads them may be gone.
        with contextlib.suppress(OSError):
            print(" ".join(without(text, self._hidden).split()), file=self._file, flush=True)

    def describe(self, error: Exception) -> str:
        """A library's exception in words, without the secrets that it may quote."""
        code = getattr(error, "error_code", None)
        words = without(str(error), self._hidden).split("\n")[0][:_LONGEST]
        return f"{code or type(error).__name__}: {words}"


def _ended(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _tracking(name: Tracker, directory: RunDirectory, say: Callable[[str], None]) -> Tracking:
    """The tracker of that name. Its module is imported here, because each needs a package of its own."""
    try:
        match name:
            case "tensorboard":
                from hpctrain.report.tracking.tensorboard_files import TensorBoardFiles

                return TensorBoardFiles(directory)
            case "mlflow":
                from hpctrain.report.tracking.mlflow_run import MlflowRun

                return MlflowRun(directory, say)
            case "wandb":
                from hpctrain.report.tracking.wandb_run import WandbRun

                return WandbRun(directory, say)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


def main(name: Tracker, directory: RunDirectory) -> int:
    """Send the events of a run to a tracker; returns the exit code."""
    os.umask(0o077)
    os.nice(_NICENESS)
    messages = _OwnOutput()
    try:
        with only_sender(directory, name), contextlib.closing(_tracking(name, directory, messages.say)) as tracking:
            has_all = follow(directory, tracking, ended=_ended, say=messages.say, describe=messages.describe)
    except HpctrainError as error:
        messages.say(f"{error.message}: {error.hint}")
        return error.exit_code
    return 0 if has_all else 1


if __name__ == "__main__":
    (tracker,) = parse_trackers(sys.argv[1])
    sys.exit(main(tracker, RunDirectory(Path(sys.argv[2]))))
