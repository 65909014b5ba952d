"""What a script does with torch.distributed on two ranks."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import rpc
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = int(os.environ["RANK"])
DATA = TensorDataset(torch.arange(24.0).reshape(8, 3))


def stored() -> object:
    """Ranks, and processes that a rank starts, meet at the port that the launcher names."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, 2, RANK == 0)
    store.set(f"from {RANK}", "here")
    found = store.get(f"from {1 - RANK}").decode()
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2)
    called = rpc.rpc_sync(f"worker{1 - RANK}", divmod, args=(7, 4))
    rpc.shutdown()
    return found, called


def group() -> object:
    """The group has the name that the script asked for, by which libraries choose what they do."""
    name = dist.get_backend()
    among = dist.new_group([0, 1], backend=name)
    dist.monitored_barrier(among)
    known = name in ("nccl", "gloo", "mpi") and name is dist.Backend.GLOO and dist.is_backend_available(name)
    return (
        name,
        known,
        dist.get_backend(among),
        dist.is_torchelastic_launched(),
        dist.get_node_local_rank(),
        dist.get_rank(),
        dist.get_world_size(),
    )


def collectives() -> object:
    own = torch.arange(4.0) + RANK
    dist.all_reduce(own)
    parts = [torch.empty(2) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(RANK)))
    whole = [None, None]
    dist.all_gather_object(whole, {"rank": RANK})
    scattered = torch.empty(1)
    dist.scatter(scattered, [torch.zeros(1), torch.ones(1)] if RANK == 0 else None)
    dist.barrier()
    if RANK == 0:
        dist.send(torch.tensor([7]), 1)
    else:
        dist.recv(number := torch.zeros(1, dtype=torch.int64), 0)
        assert number == 7
    return own.tolist(), [part.tolist() for part in parts], whole, scattered.item()


def ddp() -> object:
    torch.manual_seed(RANK)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(DATA, seed=3)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (rows,) in DataLoader(DATA, batch_size=2, sampler=sampler, num_workers=epoch):
            seen += rows[:, 0].tolist()
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    if RANK == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.barrier()
    saved = torch.load("weights.pt", weights_only=True).values()
    same = all((a == b).all() for a, b in zip(saved, model.parameters(), strict=True))
    return seen, [parameter.tolist() for parameter in model.parameters()], same


def fsdp() -> object:
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(DATA.tensors[0].chunk(2)[RANK]).square().mean().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    with torch.no_grad():
        model.weight.zero_()
    dcp.load(state := {"model": model.state_dict()}, checkpoint_id="checkpoint")
    return list(model.weight.to_local().shape), state["model"]["weight"].full_tensor().tolist()


if __name__ == "__main__":
    Path(f"stored-{RANK}.txt").write_text(json.dumps(stored()))
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    for program in (group, collectives, ddp, fsdp):
        Path(f"{program.__name__}-{RANK}.txt").write_text(json.dumps(program(), indent=1))
        print(program.__name__, dist.get_rank())
    dist.destroy_process_group()
