"""A job's end comes to the workers of a data loader too, as Slurm sends it, while they are loading."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import hpctrain as ht


def note_worker(number):
    Path(f"initialised-{os.getppid()}-{number}").touch()


class Slow(torch.utils.data.Dataset):
    """Its last samples take as long as a file system that does not answer."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.01 if index < 64 else 100)
        return torch.ones(3)


if __name__ == "__main__":
    comm = ht.init()
    loader = torch.utils.data.DataLoader(
        Slow(), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[1], worker_init_fn=note_worker
    )
    iterator = iter(loader)
    for step, _ in enumerate(iterator):
        if step == 1:
            workers = [
                each for each in psutil.Process().children() if "resource_tracker" not in " ".join(each.cmdline())
            ]
            Path(f"workers-{comm.rank}.txt").write_text(" ".join(str(worker.pid) for worker in workers))
            for worker in workers:
                for name in ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGTERM"):
                    worker.send_signal(signal.Signals[name])
            os.kill(os.getpid(), signal.SIGTERM)
        # Until then the workers are to be there.
        if step in (0, 5) and ht.should_stop():
            Path(f"saved-{comm.rank}").touch()
            sys.exit(ht.RESUMABLE)
