"""Workers of PyTorch's data loaders outlive the signals that ask their rank to stop, but never their rank.

Slurm sends SIGTERM to all processes of a job. A worker that it ends has the rank fail before it can save its state.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpctrain.worker.comm.after_import import change_after_import

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 1.0
# The classes that start workers, by module.
_STARTING = {
    "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulMultiProcessingDataLoaderIter",
}


def keep_loader_workers() -> None:
    """Change how workers are started from now on, as soon as the script imports PyTorch."""
    change_after_import(dict.fromkeys(_STARTING, _change))


def _change(module: ModuleType) -> None:
    iterator = getattr(module, _STARTING[module.__name__])
    original = iterator.__init__

    @functools.wraps(original)
    def starting(self: Any, loader: Any, *further: Any) -> None:
        initialise, loader.worker_init_fn = loader.worker_init_fn, _Initialisation(loader.worker_init_fn)
        try:
            original(self, loader, *further)
        finally:
            loader.worker_init_fn = initialise
            for worker in getattr(self, "_workers", ()):
                # The rank sends SIGTERM to its workers at its own end.
                worker._popen.terminate = worker._popen.kill

    iterator.__init__ = starting


class _Initialisation:
    """What a worker calls first, which is pickled where workers are spawned.

    Args:
        of_script: the script's own such function.
    """

    def __init__(self, of_script: Callable[[int], object] | None) -> None:
        self._of_script = of_script

    def __call__(self, worker: int) -> None:
        for number in _REQUESTS:
            # SIG_IGN would be inherited by programs that a worker starts.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        rank = multiprocessing.parent_process()
        if rank and rank.pid:
            threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()
        if self._of_script is not None:
            self._of_script(worker)


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
