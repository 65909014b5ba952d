"""Rank 1 fails; its hook, threads, exit handlers and open files have their end all the same."""

import atexit
import concurrent.futures
import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
log = open(f"log-{rank}.csv", "w")
log.write("step 1, loss 0.5\n")


def write(name, text):
    with open(f"{name}-{rank}.txt", "w") as file:
        file.write(text)
    # In a cycle with the variables of this script.
    return log


def show(kind, error, _):
    write("hook", f"{kind.__name__} {error}")


sys.excepthook = show
atexit.register(write, "handler", "tidied up")
later = concurrent.futures.ThreadPoolExecutor(1)
dist.barrier()
if rank == 1:
    later.submit(lambda: (time.sleep(0.5), write("thread", "wrote")))
    raise RuntimeError("the data set is empty")
time.sleep(30)
