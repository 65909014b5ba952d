"""Faults from within: found on PYTHONPATH by every interpreter of a faulted run, and told what to do by a variable.

``HPCTRAIN_INJECTED`` is a JSON list of objects. Each has ``what``, one of the functions below, with the arguments of
that function; ``step`` and ``rank`` (before which step of which rank, any where it is null) for those of a training;
and ``once``, a file that the first to do it makes, so that an attempt after it is spared.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_TRAINERS = {
    "hpctrain.worker.train.torch_trainer": "TorchTrainer",
    "hpctrain.worker.train.keras_trainer": "KerasTrainer",
}


def rank() -> int:
    return next((int(os.environ[name]) for name in _VARIABLES if name in os.environ), 0)


# Of a training: each gets the trainer and the step's samples, and returns what takes the place of the samples.


def pace(trainer: Any, parts: Any, *, seconds: float) -> Any:
    """Make steps long enough for a fault from outside to fall into a certain one."""
    time.sleep(seconds)
    return parts


def stop_here(trainer: Any, parts: Any, *, number: int) -> Any:
    """A signal in the middle of a step, wherever its samples are asked for."""

    def signalled() -> Iterator[Any]:
        for part in parts:
            os.kill(os.getpid(), number)
            yield part

    return signalled()


def fail(trainer: Any, parts: Any, *, message: str) -> Any:
    raise RuntimeError(message)


def poison(trainer: Any, parts: Any) -> Any:
    """One pixel that is not a number."""

    def poisoned() -> Iterator[Any]:
        for part in parts:
            images = part.images.copy()
            images[0].flat[0] = float("nan")
            yield replace(part, images=images)

    return poisoned()


def flip(trainer: Any, parts: Any, *, parameter: int, bit: int) -> Any:
    """One bit of a parameter's first number, as a memory fault leaves it."""
    import numpy as np

    def flipped(value: Any) -> Any:
        changed = np.array(value, np.float32)
        changed.reshape(-1)[:1].view(np.uint32)[:] ^= np.uint32(1 << bit)
        return changed

    if trainer.framework == "torch":
        import torch

        with torch.no_grad():
            chosen = _own_part(list(trainer.model.parameters())[parameter])
            chosen.copy_(torch.from_numpy(flipped(chosen.cpu().numpy())))
    else:
        variable = trainer.model.trainable_variables[parameter]
        variable.assign(flipped(variable.numpy()))
    return parts


def spoil(trainer: Any, parts: Any) -> Any:
    """A number of a parameter that is none, in what this rank has of it: of the last, which every sample needs."""
    import torch

    with torch.no_grad():
        *_, (_, parameter) = trainer._parameters()
        _own_part(parameter).view(-1)[0] = float("nan")
    return parts


def _own_part(parameter: Any) -> Any:
    """Of a parameter that is divided over the ranks, what this one has."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


# Of a process.


def slow_writing(*, seconds: float) -> None:
    """Checkpoints take their time to reach the disk."""
    true = os.fsync

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if "/checkpoints/" in str(Path(f"/proc/self/fd/{number}").readlink()):
            time.sleep(seconds)
        true(file)

    os.fsync = fsync


_OF_A_TRAINING: dict[str, Callable[..., Any]] = {
    "pace": pace,
    "stop_here": stop_here,
    "fail": fail,
    "poison": poison,
    "flip": flip,
    "spoil": spoil,
}
_OF_A_PROCESS: dict[str, Callable[..., None]] = {"slow_writing": slow_writing}


def _first(once: str | None) -> bool:
    """Whether nobody did it before."""
    if once is None:
        return True
    try:
        Path(once).open("x").close()
    except FileExistsError:
        return False
    return True


def _before_each_step(trainer_class: Any, injected: Sequence[dict[str, Any]]) -> None:
    true = trainer_class.step

    def step(self: Any, parts: Any, *arguments: Any, **options: Any) -> Any:
        number = self.updates + 1
        for each in injected:
            here = each.get("step") in (None, number) and each.get("rank") in (None, rank())
            if here and _first(each.get("once")):
                rest = {key: value for key, value in each.items() if key not in ("what", "step", "rank", "once")}
                parts = _OF_A_TRAINING[each["what"]](self, parts, **rest)
        return true(self, parts, *arguments, **options)

    trainer_class.step = step


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the trainers' modules as everybody does, and changes them once they are there."""

    def __init__(self, injected: Sequence[dict[str, Any]]) -> None:
        self._injected = injected
        self._loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _TRAINERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec:
            self._loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _before_each_step(getattr(module, _TRAINERS[module.__name__]), self._injected)


def _begin() -> None:
    injected = json.loads(os.environ.get("HPCTRAIN_INJECTED", "[]"))
    for each in injected:
        if each["what"] in _OF_A_PROCESS:
            _OF_A_PROCESS[each["what"]](**{key: value for key, value in each.items() if key != "what"})
    if training := [each for each in injected if each["what"] in _OF_A_TRAINING]:
        sys.meta_path.insert(0, _Changed(training))


_begin()
# There is one module of this name: what the tests' other processes begin with comes after it.
_STARTUP = Path(__file__).parents[2] / "support" / "startup"
sys.path.append(str(_STARTUP))
runpy.run_path(str(_STARTUP / "sitecustomize.py"))
