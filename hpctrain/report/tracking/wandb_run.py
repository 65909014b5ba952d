"""A run of Weights & Biases, written to files that ``wandb sync`` uploads: nothing is sent from here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import make_folder
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import Event, EventsFile, kept, run_id
from hpctrain.common.run.events.kinds import EndEvent
from hpctrain.common.run.plan import Plan
from hpctrain.report.tracking.curves import Curves, facts, parameters, title

_PROJECT = "hpctrain"
_STEP = "iteration"
# W&B's own have eight letters.
_ID_LENGTH = 16


class WandbRun:
    """Implements :class:`hpctrain.report.tracking.sending.Tracking`.

    The run's files are written when it has ended, from all of its events that count: W&B takes nothing back.
    """

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say

    def send(self, events: Sequence[Event]) -> None:
        pass

    def close(self) -> None:
        import wandb

        plan, identity = read_model(self._directory.plan, Plan), run_id(self._directory.events)[:_ID_LENGTH]
        make_folder(self._directory.wandb, within=self._directory.path)
        for old in self._directory.wandb.glob(f"offline-run-*-{identity}"):
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
        run = wandb.init(
            dir=str(self._directory.path),
            id=identity,
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=title(plan, self._directory),
            config=parameters(plan),
            mode="offline",
            settings=settings,
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        curves, done = Curves(), False
        for event in kept(EventsFile(self._directory.events)):
            if changed := facts([event]):
                run.config.update(changed, allow_val_change=True)
            if point := curves.point(event):
                run.log({**point.values, _STEP: point.iteration, "_timestamp": point.time})
            if isinstance(event, EndEvent):
                done = event.status == "done"
        run.finish(exit_code=0 if done else 1)
        for folder in self._directory.wandb.glob(f"offline-run-*-{identity}"):
            self._say(f"wandb: wandb sync {shell_word(folder)} uploads the run")
