"""``python -m hpctrain.report.tracking NAME RUN_DIR``: sends a run's events to a tracker until its input ends.

Started by :mod:`hpctrain.report.tracking.processes`, whose end, even by a kill, ends the input. Prints messages for the
user, a line each. Exits with 0 if the tracker has everything.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.control.supervision.trackers import MLFLOW_SERVER, require_server
from hpctrain.report.tracking.following import Tracking, follow
from hpctrain.report.tracking.mlflow_run import ENVIRONMENT, MlflowRun
from hpctrain.report.tracking.progress import only_sender
from hpctrain.report.tracking.redaction import secrets, server, without
from hpctrain.report.tracking.wandb_run import WandbRun

# Characters of a library's message, whose beginning says what is wrong.
_LONGEST = 300
# The ranks on this machine go first.
_NICENESS = 10


class _Messages:
    """Writes lines to the standard output. The libraries print into the null device, because they print addresses."""

    def __init__(self, name: str) -> None:
        address = os.environ.get(MLFLOW_SERVER) if name == "mlflow" else None
        self._hidden = secrets(os.environ, address)
        self._shown = server(address) if address else name
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
        return f"{self._shown} fails ({code or type(error).__name__}: {words})"


def _ended(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


@contextlib.contextmanager
def _tracking(name: str, directory: RunDirectory, messages: _Messages) -> Iterator[Tracking]:
    plan = read_model(directory.plan, Plan)
    tracking: Tracking
    if name == "mlflow":
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        tracking = MlflowRun(directory, plan, require_server(), messages.say)
    else:
        tracking = WandbRun(directory, plan, messages.say)
    try:
        yield tracking
    finally:
        tracking.close()


def main(name: str, directory: RunDirectory) -> int:
    """Send the events of a run to a tracker; returns the exit code."""
    os.umask(0o077)
    os.nice(_NICENESS)
    messages = _Messages(name)
    try:
        with only_sender(directory, name), _tracking(name, directory, messages) as tracking:
            has_all = follow(directory, tracking, ended=_ended, say=messages.say, describe=messages.describe)
    except HpctrainError as error:
        messages.say(f"{error.message}: {error.hint}")
        return error.exit_code
    return 0 if has_all else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], RunDirectory(Path(sys.argv[2]))))
