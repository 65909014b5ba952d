"""Who does the work of a folder of shards: this process, or several of this machine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from hpctrain.errors import HpctrainError

# map, or what does it on other processes.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
# Of a process among others that share the cores.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def worker_processes(workers: int) -> Iterator[Map]:
    """``map`` on so many processes; in this one where one is enough.

    Raises:
        HpctrainError: a process was killed.
    """
    if workers == 1:
        yield map
        return
    # Not forked: the tokenisers' library has threads.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        raise HpctrainError(
            "a process that makes shards was ended from outside, as happens when memory runs out",
            "the same command continues; use fewer --workers if memory ran short",
            exit_code=1,
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A pool's processes would wait for ever for the work of one that was killed."""
    if parent := parent_process():
        parent.join()
    os._exit(1)
