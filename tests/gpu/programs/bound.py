"""Runs a program of tests/mpi with a default group that is bound to the rank's GPU, as scripts ask for it.

``python bound.py PROGRAM ARGUMENTS…``
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hpctrain as ht

join = ht.init


def bound(*backend: str) -> ht.Communicator:
    comm = join(*backend)
    if backend:
        # Over Gloo there is no GPU, and what is asked for is ignored.
        dist.init_process_group(device_id=torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return comm


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    ht.init = bound
    runpy.run_path(sys.argv[0], run_name="__main__")
