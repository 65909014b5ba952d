"""Writes what a rank computes, and ends its work after the steps that were asked for."""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.step_records import Kept, RankFacts, StepFiles, StepRecord
from hpctrain.common.settings import VERIFY_STEPS
from hpctrain.worker.comm.after_import import change_after_import

# From the most precise floating type on.
_TYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
# More samples of a step say nothing new.
_MOST_SAMPLES = 2**16


class Recorder:
    """What a rank computes between two steps, and the steps that are written.

    Attributes:
        several: whether there are other ranks.
        perturbs: whether parameters begin with rounding errors, to see what these make of the results.
    """

    def __init__(self, directory: RunDirectory, rank: int, ranks: int, settings: dict[str, Any]) -> None:
        self.several = ranks > 1
        self.perturbs: float | None = settings["perturb"]
        self.facts = RankFacts()
        self._steps: int = settings["steps"]
        self._files = StepFiles(directory.path, rank)
        self._files.begin()
        signal.signal(signal.SIGURG, _exit)
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._samples: list[NDArray[np.float64]] = []
        self._files.write(self.facts)

    def samples(self, rows: NDArray[Any]) -> None:
        """Note a number for each sample that a model gets, which are the rows of an array."""
        if sum(map(len, self._samples)) < _MOST_SAMPLES:
            flat = rows.reshape(len(rows), -1 if len(rows) else 1).astype(np.float64)
            wave = np.cos(np.arange(flat.shape[1]) * 1.7 + 0.3)
            self._samples.append(flat @ wave / max(flat.shape[1], 1) ** 0.5)

    def computes_in(self, dtype: str) -> None:
        """Note a floating type in which a model computes."""
        known = self.facts.low
        if dtype in _TYPES and (not known or _TYPES.index(dtype) > _TYPES.index(known)):
            self.facts.low = dtype

    def step(self, optimizer: object, kept: Iterable[Kept]) -> None:
        """Write a step of an optimizer, and end the work if it was the last one that was asked for.

        Raises:
            SystemExit: it was, and this is the main thread, which another one interrupts.
        """
        if self.facts.complete:  # The script caught the end, and goes on.
            end_work()
        samples = np.concatenate([np.zeros(0), *self._samples])
        self._files.add(StepRecord(samples=samples, kept=tuple(kept)))
        self._samples = []
        made = self._made[optimizer] = self._made.get(optimizer, 0) + 1
        self.facts.complete = made >= self._steps
        self.save()
        if self.facts.complete:
            end_work()

    def save(self) -> None:
        """Write what is known so far."""
        self._files.write(self.facts)


def end_work() -> None:
    """End the work in good order, as a script does by ``sys.exit(0)``, at the same place on every rank.

    Raises:
        SystemExit: this is the main thread. Another one interrupts it instead.
    """
    if threading.current_thread() is threading.main_thread():
        sys.exit(0)
    _thread.interrupt_main(signal.SIGURG)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def record_steps(plan: Plan, directory: RunDirectory, rank: int) -> None:
    """Record this rank's steps, if the run is one of ``hpctrain verify``. Called before the work begins."""
    if (text := VERIFY_STEPS.read()) is None:
        return
    # A script that asks for input gets its end, and not the one that Open MPI 5 forwards: a rank 0 that has read that
    # before it joins the others waits for ever.
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    settings = json.loads(text)
    recorder = Recorder(directory, rank, plan.processes, settings)

    def watch_torch(module: Any) -> None:
        from hpctrain.worker.verify.torch_steps import TorchSteps

        TorchSteps(recorder).watch()

    def watch_keras(module: Any) -> None:
        from hpctrain.worker.verify.keras_steps import watch

        watch(recorder)

    change_after_import({"torch": watch_torch, "keras": watch_keras})
