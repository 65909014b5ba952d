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
from types import ModuleType
from typing import Any

from hpctrain.worker.comm.after_import import change_after_import

_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 1.0


def keep_loader_workers() -> None:
    """Change PyTorch's workers that are forked from now on, as soon as the script imports PyTorch."""
    change_after_import(
        {"torch.utils.data._utils.signal_handling": _outlast_requests, "torch.utils.data.dataloader": _end_by_kill}
    )


def _outlast_requests(module: ModuleType) -> None:
    original = module._set_worker_signal_handlers

    @functools.wraps(original)
    def setting() -> None:
        original()
        for number in _REQUESTS:
            # SIG_IGN would be inherited by programs that a worker starts.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        rank = multiprocessing.parent_process()
        if rank and rank.pid:
            threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()

    module._set_worker_signal_handlers = setting  # type: ignore[attr-defined]


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def _end_by_kill(module: ModuleType) -> None:
    """Let the rank end its workers by SIGKILL where it would send SIGTERM, as at its own end."""
    iterator = module._MultiProcessingDataLoaderIter
    original = iterator.__init__

    @functools.wraps(original)
    def starting(self: Any, *arguments: Any, **settings: Any) -> None:
        try:
            original(self, *arguments, **settings)
        finally:
            for worker in getattr(self, "_workers", ()):
                worker._popen.terminate = worker._popen.kill

    iterator.__init__ = starting
