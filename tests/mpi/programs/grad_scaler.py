"""Trains with a GradScaler on meshes: an overflow on one rank, with and without ``unscale_``, clipping between.

``python grad_scaler.py OUT BACKEND`` writes OUT-RANK.json: by case the parameters and the scale after each step. The
tests import this file and call :func:`trained` without hpctrain: the reference on whole batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 30
MAKE: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
}
# Whether the script calls unscale_, what it clips, and the batch size: 6 divides evenly over 2 and 3 ranks.
CASES = [
    (name, unscale, clip, batch)
    for name in MAKE
    for unscale, clip in ((False, ""), (True, ""), (True, "model"), (True, "groups"))
    for batch in (6, 7)
]
PLACES = {"zero1": (1, {"dp_shard": -1}), "zero3": (3, {"dp_shard": -1}), "replicas": (3, {"dp_replicate": -1})}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.layers(x)}


def trained(case: tuple[str, bool, str, int], ht: Any = None, place: str = "") -> dict[str, list[float]]:
    name, unscale, clip, batch = case
    model = Network()
    optimizer = MAKE[name](model.parameters())
    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3)).double()
    loader: Any = DataLoader(TensorDataset(data), batch_size=batch)
    overflows = True
    if ht:
        zero, mesh = PLACES[place]
        ht.distribute(model, optimizer, mesh=ht.mesh(**mesh), plan=ht.ParallelPlan(zero=zero))
        loader, overflows = ht.shard(loader), ht.init().rank == ht.init().size - 1
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scales = []
    for _ in range(2):
        for index, (x,) in enumerate(loader):
            loss = (model(x)["y"] - x[:, :3]).square().mean() * (torch.inf if index == 1 and overflows else 1)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                of_groups = [each for group in optimizer.param_groups for each in group["params"]]
                nn.utils.clip_grad_norm_(model.parameters() if clip == "model" else of_groups, 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return {"parameters": torch.cat([each.detach().flatten() for each in whole]).tolist(), "scales": scales}


def main() -> None:
    import hpctrain as ht

    torch.set_num_threads(1)
    comm = ht.init(sys.argv[2])
    found = {f"{case}/{place}": trained(case, ht, place) for case in CASES for place in PLACES}
    Path(f"{sys.argv[1]}-{comm.rank}.json").write_text(json.dumps(found))
    comm.barrier()


if __name__ == "__main__":
    main()
