"""Rank 1 stops itself with SIGSTOP, and the others wait for it over Gloo.

Each of the others prints one JSON object: the error with its rank, its host and the seconds that it waited.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

import hpctrain as ht
from hpctrain.worker.comm.rank_run import end_job

comm = ht.init("gloo")
engine = comm.torch()
buffer = engine.allocate(100, torch.float32, torch.device("cpu"))
engine.allreduce(buffer, "before").wait()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    # The launcher continues it to end it.
    time.sleep(60)
began = time.monotonic()
try:
    engine.allreduce(buffer, "bucket").wait()
except ht.HpctrainError as error:
    said = {**error.record(), "on": comm.rank, "host": comm.host, "after": time.monotonic() - began}
    print(f"{json.dumps(said)}\n", end="", flush=True)
    Path(f"said-{comm.rank}").touch()
    end = time.monotonic() + 15
    while len([*Path().glob("said-*")]) < comm.size - 1 and time.monotonic() < end:
        time.sleep(0.1)
    end_job(error.exit_code)
