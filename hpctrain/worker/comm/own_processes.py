"""Finds out whether processes that a rank starts train among themselves, each rank's without the other ranks'.

Scripts without a launcher start their ranks by ``mp.spawn`` or ``mp.Process``. Where several ranks run such a script,
each starts all of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hpctrain.worker.comm import forks
from hpctrain.worker.comm.after_import import change_after_import

_PROCESSES = "multiprocessing.process"
# How these processes are started, None for the default. Others, such as joblib's, may be pickled in another way, which
# memory that is shared cannot be.
_START_METHODS = (None, "fork", "spawn", "forkserver")
# Workers of these do not train: pools, managers and loaders of data.
_WORKERS = (*sys.stdlib_module_names, "torch.utils.data")

_watching = False
_started = 0
# Shared with the processes: how many of them train together. It needs no lock, since they all write the same.
_together: c_int64 | None = None


@dataclass(frozen=True)
class _Watched:
    """What a process of a rank is to do. It is handed to the process, which may have to import this module first."""

    target: Callable[..., object]
    together: c_int64

    def __call__(self, *arguments: Any, **settings: Any) -> None:
        from hpctrain.worker.comm import forgotten

        def trains() -> None:
            self.together.value = forgotten.processes_met()

        forgotten.watch(trains)
        self.target(*arguments, **settings)


def watch() -> None:
    """Watch the processes that this rank starts from now on. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        change_after_import({_PROCESSES: _watch_starts})


def trained_apart() -> bool:
    """Whether processes of this rank have trained together, and no process of another rank with them."""
    return _together is not None and 0 < _together.value <= _started


def _watch_starts(module: ModuleType) -> None:
    start, run = module.BaseProcess.start, module.BaseProcess.run

    @functools.wraps(start)
    def starting(process: Any) -> None:
        # A subclass may have a run() of its own in place of a target.
        place = "_target" if type(process).run is run else "run"
        target = getattr(process, place)
        own = getattr(process, "_start_method", "") in _START_METHODS
        if own and target is not None and not forks.is_fork() and not _is_worker(target):
            setattr(process, place, _watched(target))
        start(process)

    module.BaseProcess.start = starting


def _is_worker(target: object) -> bool:
    while isinstance(target, functools.partial):
        target = target.func
    module = getattr(target, "__module__", None) or ""
    return any(module == name or module.startswith(f"{name}.") for name in _WORKERS)


def _watched(target: Callable[..., object]) -> _Watched:
    global _started, _together
    from multiprocessing.sharedctypes import RawValue

    if _together is None:
        _together = RawValue(c_int64, 0)
    _started += 1
    return _Watched(target, _together)
