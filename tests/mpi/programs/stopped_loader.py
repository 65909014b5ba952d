"""A job's end comes to the workers of a data loader too, as Slurm sends it, while they are loading."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import hpctrain as ht


class Slow(torch.utils.data.Dataset):
    """Its last samples take as long as a file system that does not answer."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.01 if index < 64 else 100)
        return torch.ones(3)


if __name__ == "__main__":
    comm = ht.init()
    loader = torch.utils.data.DataLoader(Slow(), batch_size=8, num_workers=2)
    iterator = iter(loader)
    for step, _ in enumerate(iterator):
        if step == 1:
            workers = psutil.Process().children()
            Path(f"workers-{comm.rank}.txt").write_text(" ".join(str(worker.pid) for worker in workers))
            for worker in workers:
                for name in ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGTERM"):
                    worker.send_signal(signal.Signals[name])
            os.kill(os.getpid(), signal.SIGTERM)
        # Until then the workers are to be there.
        if step in (0, 5) and ht.should_stop():
            Path(f"saved-{comm.rank}").touch()
            sys.exit(ht.RESUMABLE)
