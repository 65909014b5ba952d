"""A run of Weights & Biases, written to files that ``wandb sync`` uploads: nothing is sent from here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events.kinds import EndEvent
from hpctrain.common.run.plan import Plan
from hpctrain.report.tracking.following import NewEvent
from hpctrain.report.tracking.parameters import facts, parameters, title
from hpctrain.report.tracking.progress import TrackerProgress, read_progress

_PROJECT = "hpctrain"
_STEP = "iteration"
# W&B's own have eight letters.
_ID_LENGTH = 16


class WandbRun:
    """Implements :class:`hpctrain.report.tracking.following.Tracking`.

    The run's files are made anew by each process and at each resume, from the events that count.

    Args:
        say: prints the command that uploads the files.
    """

    rewrites = True
    place = "wandb"

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._plan = read_model(directory.plan, Plan)
        self._say = say
        self._id = read_progress(directory, "wandb").id[:_ID_LENGTH]
        self._run: Any = None
        self._status = "resumable"

    def open(self) -> TrackerProgress:
        import wandb

        self._finish()
        for old in self._directory.wandb.glob(f"offline-run-*-{self._id}"):
            shutil.rmtree(old)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            # W&B would record this process, which is not the training.
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            dir=str(self._directory.path),
            id=self._id,
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=title(self._plan, self._directory),
            config=parameters(self._plan),
            mode="offline",
            settings=settings,
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        return TrackerProgress()

    def send(self, entries: Sequence[NewEvent]) -> None:
        if changed := facts(entry.event for entry in entries):
            self._run.config.update(changed, allow_val_change=True)
        for entry in entries:
            if entry.point:
                row = {_STEP: entry.point.iteration, "_timestamp": entry.point.time}
                self._run.log({**entry.point.values, **row})
            if isinstance(entry.event, EndEvent):
                self._status = entry.event.status

    def close(self) -> None:
        self._finish()
        for folder in self._directory.wandb.glob(f"offline-run-*-{self._id}"):
            self._say(f"wandb sync {shell_word(folder)} uploads the run")

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._status == "done" else 1)
            self._run = None
