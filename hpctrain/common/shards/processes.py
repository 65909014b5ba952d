"""How many processes of this machine make a folder of shards at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from hpctrain.common.errors import HpctrainError

# The built-in map, or a function like it that uses other processes.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
# Variables for each of several processes that share the cores.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def worker_processes(workers: int) -> Iterator[Map]:
    """``map`` over so many processes; for one this process itself.

    Raises:
        HpctrainError: a process was killed.
    """
    if workers == 1:
        yield map
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Not forks: libraries that read the source have threads.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield pool.map
    except BaseException as error:
        # Otherwise leaving the executor waits for the work in progress.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise HpctrainError(
                "HT-process-killed",
                "a process that makes shards was killed, or crashed on a file",
                "the same command continues; with fewer processes if memory ran short",
                exit_code=1,
            ) from error
        raise
    finally:
        pool.shutdown()


def _begin() -> None:
    """Leave Ctrl-C to the process that handed out the work, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
