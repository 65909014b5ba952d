"""Ranks that stall in several ways, and come back or not. Every two ranks say that they have a host of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

launched = int(os.environ["OMPI_COMM_WORLD_RANK"])
socket.gethostname = lambda: f"node{launched // 2}"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.worker.comm import liveness  # noqa: E402
from hpctrain.worker.comm.stalls import reports  # noqa: E402

STALL_SECONDS = 4
# A wait that goes on is looked into again at once: the second probe of each must find nothing new to say.
liveness._LOOK_AGAIN_SECONDS = 0.0
reports.iteration = lambda: 7
reports.record = lambda stall: print("recorded", stall.rank, stall.host, stall.waiting_for, flush=True)

comm = ht.init("mpi")
engine = comm.torch()
bucket = engine.allocate(3_000_000, torch.float32, torch.device("cpu"))


def stop() -> None:
    """Stop this process, and have another let it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {STALL_SECONDS + 1.5}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_python() -> None:
    time.sleep(STALL_SECONDS)


def read_what_comes_late() -> None:
    with subprocess.Popen(["sleep", str(STALL_SECONDS)], stdout=subprocess.PIPE) as late:
        late.stdout.read()


def reduce_and_check(name: str) -> None:
    bucket.fill_(comm.rank)
    engine.allreduce(bucket, name).wait()
    assert torch.all(bucket == (comm.size - 1) / 2)


def say(text: str) -> None:
    """Say it once all ranks are here, and longer than any thread needs to say what it saw of the wait before."""
    comm.barrier()
    time.sleep(0.5)
    if comm.rank == 0:
        print(text, flush=True)
    comm.barrier()


def come_back() -> None:
    say("== below the limit")
    if comm.rank == 1:
        time.sleep(1)
    comm.barrier()
    say("== stopped")
    if comm.rank == 3:
        stop()
    if comm.rank == 1:
        time.sleep(1.5)  # it comes late, but it waits when the others call
    reduce_and_check("large bucket")
    say("== in Python and in a read")
    if comm.rank == 0:
        read_what_comes_late()
    if comm.rank == 2:
        sleep_in_python()
    assert comm.allreduce(np.array([comm.rank + 1.0]), "sum") == comm.size * (comm.size + 1) / 2
    say("== different paths")
    for mine in (0, 1):
        # a barrier that half of the ranks take for another one
        if comm.rank % 2 == mine:
            reduce_late(f"path {mine}")
    say("== end")
    ht.shutdown()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    print("shut down", flush=True)


def reduce_late(name: str) -> None:
    begin = time.monotonic()
    comm.timeout.wait(lambda: time.monotonic() - begin > STALL_SECONDS, name)


def block() -> None:
    """Wait where nothing can be raised."""
    if comm.rank == 1:
        sleep_in_python()
        time.sleep(60)
    with comm.timeout.blocking("small bucket"):
        MPI.COMM_WORLD.Barrier()


{"come_back": come_back, "block": block}[sys.argv[1]]()
