"""What a user's script may do on two ranks: end well, or in one of several bad ways."""

import os
import signal
import sys
import time

import numpy as np

import hpctrain as ht

what = sys.argv[1]
if what == "leave":
    # Without MPI: the launcher alone has to end the others.
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        sys.exit(7)
    time.sleep(600)

comm = ht.init()
print("arguments", sys.argv[2:], flush=True)
match what:
    case "sum":
        print("sum", comm.allreduce(np.array([comm.rank + 1.0]), "sum"), os.environ["OMP_NUM_THREADS"], flush=True)
    case "raise":
        if comm.rank == 1:
            print("about to fail")
            raise ValueError("boom")
        comm.barrier()
    case "kill":
        if comm.rank == 1:
            print("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    case "wait":
        if comm.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        comm.barrier()
        print("ready", flush=True)
        time.sleep(600)
