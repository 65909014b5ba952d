"""Rank 0 forks in all ways, while the ranks share memory and connections; prints how each fork ended."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

import hpctrain as ht
from hpctrain.common.errors import HpctrainError

comm = ht.init()
engine = comm.torch()
buffer = engine.allocate(100_000, torch.float32, torch.device("cpu"))
atexit.register(print, f"exit handler of process {os.getpid()}", flush=True)


def reduce() -> None:
    buffer.fill_(comm.rank + 1)
    engine.allreduce(buffer, "a bucket").wait()
    assert (buffer == 1.5).all()


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except HpctrainError:
        sys.exit(7)


def fail() -> None:
    raise ValueError("raised in a fork")


def leave_by_hand() -> None:
    raise SystemExit(6)


def speak_late() -> None:
    time.sleep(0.5)
    os.write(1, b"thread of a fork\n")


def square(number: int) -> int:
    return number * number


def fork(work: Callable[[], object]) -> int:
    """The exit status of a fork that does this work and then comes to the end of the script."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # the rank's own is not inherited
        work()
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


forking = multiprocessing.get_context("fork")
signal.alarm(100)
reduce()
if comm.rank == 0:
    ht.log(in_the_rank=1)
    ways = {
        "status": lambda: sys.exit(3),
        "text": lambda: sys.exit("a text"),
        "end": lambda: None,
        "exception": fail,
        "_exit": lambda: os._exit(5),
        "log": lambda: ht.log(in_a_fork=1),
        "shutdown": ht.shutdown,
        "place": lambda: sys.exit(10 + ht.init().rank),
        "barrier": lambda: refused(comm.barrier),
        "reduction": lambda: refused(reduce),
        "handler": lambda: atexit.register(os.write, 1, b"exit handler of a fork\n"),
        "thread": lambda: threading.Thread(target=speak_late).start(),
        "grandchild": lambda: sys.exit(fork(lambda: sys.exit(8))),
        "by hand": leave_by_hand,
    }
    with forking.Pool(2) as pool:
        squares = pool.map(square, range(5))
    loader = torch.utils.data.DataLoader(torch.arange(20.0), batch_size=5, num_workers=2)
    loaded = sum(batch.sum().item() for batch in loader)
    child = forking.Process(target=time.sleep, args=(100,), daemon=True)
    child.start()
    found = {name: fork(work) for name, work in ways.items()}
    lives = child.is_alive()
    child.terminate()
    child.join()
    others = {"pool": squares, "loader": loaded, "child lives": lives}
    print("ended", json.dumps(found | others), flush=True)
reduce()
comm.barrier()
print(f"rank {comm.rank} in process {os.getpid()} is done", flush=True)
