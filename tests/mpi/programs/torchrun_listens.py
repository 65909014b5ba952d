"""Two runs under torchrun meet in a folder: ``FOLDER NAME OTHER``. Each writes where its torchrun listens."""

import json
import os
import sys
import time
from pathlib import Path

import psutil

import hpctrain as ht

folder, name, other = Path(sys.argv[1]), *sys.argv[2:]
comm = ht.init()
if comm.rank == 0:
    torchrun = psutil.Process(os.getppid())
    found = [each.laddr.ip for each in torchrun.net_connections() if each.status == psutil.CONN_LISTEN]
    fresh = folder / f".{name}"
    fresh.write_text(json.dumps(found))
    fresh.rename(folder / name)
    end = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < end, "the other run has not begun"
        time.sleep(0.1)
comm.barrier()
