"""Divides the making of shards over processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.resumable import Map

_Made = TypeVar("_Made")


def with_processes(count: int, make: Callable[[Map], _Made]) -> _Made:
    """What ``make`` returns, which is given a map that uses ``count`` processes.

    Raises:
        HpctrainError: a process was killed, or what ``make`` raises.
    """
    if count == 1:
        return make(map)
    # Spawned, as threads of this process, such as those that read Parquet files, do not survive a fork.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)
    try:
        return make(pool.map)
    except BrokenProcessPool as error:
        raise HpctrainError(
            "HT-process-killed",
            "one of {count} processes that make shards was killed",
            "usually memory ran out; the same command with a smaller -np continues the work",
            exit_code=1,
            count=count,
        ) from error
    finally:
        # Shards in progress are finished; after an error the others are left to the next attempt.
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    # The library of tokenisers would start a thread for each core in every process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches all processes, and is handled by the one that started these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
