"""How many processes of this machine make a folder of shards at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpctrain.common.shards.confined import end_all

# The built-in map, or a function like it that uses other processes.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
# Variables for each of several processes that share the cores.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def worker_processes(workers: int) -> Iterator[Map]:
    """``map`` for functions that wait for processes of :mod:`hpctrain.common.shards.confined`: so many at a time."""
    if workers == 1:
        yield map
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threads = ThreadPoolExecutor(workers)
    try:
        yield threads.map
    except BaseException:
        # Otherwise leaving the executor waits for the work in progress.
        threads.shutdown(wait=False, cancel_futures=True)
        end_all()
        raise
    finally:
        threads.shutdown()
