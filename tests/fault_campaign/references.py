"""Runs without any fault, and runs that were stopped in good order, made once for all cases that need them."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_campaign.faulted_run import Ended, Place, Training

# Four epochs of 23 steps, of which each writes a checkpoint.
EPOCHS, STEPS = 4, 92
_DIGITS = ("digits", "--set", f"epochs={EPOCHS}")
# As many epochs and steps of a transformer, which has blocks and heads to divide.
_GPT = ("gpt2-124m", "--smoke", "--set", "data.epoch_samples=368", "--set", f"epochs={EPOCHS}")
# Between two steps of a run that is to be met by a fault: rank 0 looks once a second whether it was asked to stop.
PACE = {"what": "pace", "seconds": 0.03}
# After the second checkpoint, and soon enough for that second.
_STOPPED_AT = 47


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on what: arguments of ``hpctrain run``."""

    framework: str
    backend: str
    ranks: int
    work: tuple[str, ...] = _DIGITS
    mesh: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        engine = ("--backend", self.backend, "--framework", self.framework)
        mesh = ("--mesh", self.mesh) if self.mesh else ()
        return (*self.work, "-np", str(self.ranks), "--oversubscribe", *engine, *mesh)


def work_on(mesh: str) -> tuple[str, ...]:
    """What is trained on a mesh: digits, wherever they can be."""
    return _GPT if "tp=" in mesh or "pp=" in mesh else _DIGITS


class UnfitError(Exception):
    """A run without any fault failed, so that nothing can be said of those with."""


@dataclass(kw_only=True)
class Library:
    """The runs that others are compared with, in a folder of their own.

    Attributes:
        folder: for them.
        limit: seconds for each.
        held: what is closed after the last case.
    """

    folder: Path
    limit: float
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _kept: dict[str, Any] = field(default_factory=dict)
    _made: dict[tuple[Setting, bool], Path] = field(default_factory=dict)

    def whole(self, setting: Setting) -> Path:
        """The directory of a run that nothing has disturbed."""
        return self._run(setting, stopped=False)

    def stopped(self, setting: Setting) -> Path:
        """The directory of one that was asked to stop after its second epoch, whose checkpoint is still there."""
        return self._run(setting, stopped=True)

    def kept(self, name: str, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
        """Something else that is made once."""
        if name not in self._kept:
            self._kept[name] = self.held.enter_context(make())
        return self._kept[name]

    def _run(self, setting: Setting, *, stopped: bool) -> Path:
        if (setting, stopped) not in self._made:
            self._made[setting, stopped] = self._make(setting, stopped=stopped)
        return self._made[setting, stopped]

    def _make(self, setting: Setting, *, stopped: bool) -> Path:
        folder = self.folder / f"{len(self._made)}"
        folder.mkdir(parents=True)
        place = Place(folder=folder, limit=self.limit)
        try:
            training = place.begin(*setting.arguments, injected=[PACE] if stopped else [])
            if stopped:
                _stop(training)
            self._require(training.end(), 4 if stopped else 0, setting)
        finally:
            place.kill_all()
        return place.directory.path

    def _require(self, ended: Ended, code: int, setting: Setting) -> None:
        if ended.code != code:
            raise UnfitError(f"{' '.join(setting.arguments)} exited {ended.code}:\n{ended.printed}")


def _stop(training: Training) -> None:
    training.wait_for_step(_STOPPED_AT)
    training.send(signal.SIGUSR2)


def copied(run: Path, place: Place) -> Path:
    """A copy of a run to be damaged."""
    return Path(shutil.copytree(run, place.directory.path))
