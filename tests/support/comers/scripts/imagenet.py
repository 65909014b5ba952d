"""After main.py of PyTorch's ImageNet example: mp.spawn or a launcher, a sampler, a schedule, a checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    processes = torch.cuda.device_count() or 1
    if args.multiprocessing_distributed:
        args.world_size = processes * args.world_size
        mp.spawn(main_worker, nprocs=processes, args=(processes, args))
    else:
        main_worker(int(os.environ.get("LOCAL_RANK", 0)), processes, args)


def join(local, processes, args):
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.multiprocessing_distributed:
        args.rank = args.rank * processes + local
    dist.init_process_group(
        backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )


def main_worker(local, processes, args):
    if args.distributed:
        join(local, processes, args)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    if args.distributed:
        args.batch_size = args.batch_size // args.world_size
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    first = 0
    if os.path.isfile("checkpoint.pth.tar"):
        checkpoint = torch.load("checkpoint.pth.tar", weights_only=True)
        first = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    sampler = DistributedSampler(data) if args.distributed else None
    loader = DataLoader(data, args.batch_size, shuffle=sampler is None, num_workers=1, sampler=sampler)
    for epoch in range(first, 10):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        total = torch.tensor([loss.item() * len(x), len(x)])
        if args.distributed:
            dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        if args.rank <= 0:
            print(f"step {epoch} loss {(total[0] / total[1]).item()!r}")
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "scheduler": scheduler.state_dict()}, "saving.pth.tar")
            os.replace("saving.pth.tar", "checkpoint.pth.tar")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
