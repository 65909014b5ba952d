"""Runs a program of tests/mpi with what it makes on a GPU, which the ranks share if there are more of them.

``python on_gpu.py PROGRAM ARGUMENTS…``
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    program = sys.argv[0]
    sys.path.insert(0, str(Path(program).parent))
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)) % gpus)
        torch.set_default_device("cuda")
        # TensorFloat-32 is another precision than that of a reference.
        torch.backends.cudnn.allow_tf32 = False
    runpy.run_path(program, run_name="__main__")
