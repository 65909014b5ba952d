"""Times one training step of a network without communication for several batches, which calibrates predictions.

``python sweep.py OUT.json MODEL ROUNDS BATCHES IMAGE_SIZE PRECISION`` on every rank; BATCHES joined by commas. All
ranks compute at the same time, on GPUs where there are some, and the batches take turns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from mpi4py import MPI

from hpctrain.common.cluster.gpus import only_gpu, see_one_each
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.workloads import workload

# The types of autocast; parameters stay float32, as in recipes.
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def step(model: str, batch: int, image_size: int, rank: int, device: torch.device, precision: str) -> Call:
    """One step of a new network, until the device has finished it."""
    work = workload(model, batch=batch, image_size=image_size, rank=rank)
    network = work.build().to(device)
    x, y = work.x.to(device), work.y.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def call() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, _NARROW.get(precision), enabled=precision in _NARROW):
            loss = torch.nn.functional.cross_entropy(network(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return call


def main(out: str, model: str, rounds: str, batches: str, image_size: str, precision: str) -> None:
    # Not hpctrain's own communicator, which would warn that no gradients are reduced.
    world = MPI.COMM_WORLD.Dup()
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = 0 if see_one_each(node.allgather(only_gpu())) else node.rank
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    calls = {
        batch: step(model, int(batch), int(image_size), world.rank, device, precision) for batch in batches.split(",")
    }
    seconds = time_in_turn(world, [TimedGroup(calls=calls)], rounds=int(rounds))
    if world.rank == 0:
        name = torch.cuda.get_device_name(device) if cuda else None
        Path(out).write_text(json.dumps({"seconds": seconds, "gpu": name}))


if __name__ == "__main__":
    main(*sys.argv[1:])
