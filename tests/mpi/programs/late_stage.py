"""A rank waits for what the other stage of a pipeline never sends: how long. ``python late_stage.py BACKEND``"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpctrain as ht

comm = ht.init(sys.argv[1])
group = ht.mesh(pp=2)["pp"].get_group()
begin = time.monotonic()
if comm.rank == 0:
    with contextlib.suppress(RuntimeError):
        dist.recv(torch.zeros(4), group=group, group_src=1)
    print("waited", time.monotonic() - begin, flush=True)
    Path("over").touch()
else:
    while not Path("over").exists():
        time.sleep(0.1)
os._exit(0)
