"""Bytes that a rank holds of a model's state, for each stage of ZeRO: ``python parallel_memory.py OUT BACKEND``.

Writes OUT-RANK.json. Each stage is trained two steps; what is counted are the storages of all tensors that are alive,
above those alive before the model was made, and the resident memory beside it.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH = 12, 512
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
FLOAT = 4


def storages() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu":
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def resident(of: str) -> int:
    """VmRSS, or VmHWM: the most since it was forgotten."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(of))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Layer(nn.Linear):
    pass


def measure(zero: int) -> dict[str, float]:
    import hpctrain as ht

    gc.collect()
    before, before_resident = storages(), resident("VmRSS")
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = ht.mesh(dp_shard=-1)
    model, optimizer = ht.distribute(model, optimizer, mesh=mesh, plan=ht.ParallelPlan(shard=[Layer], zero=zero))
    found: dict[str, float] = {}
    for _ in range(2):
        optimizer.zero_grad()
        forget_peak()
        loss = model(torch.ones(4, WIDTH)).square().mean()
        found["after_forward"] = storages() - before
        loss.backward()
        found["after_backward"] = storages() - before
        optimizer.step()
        del loss
        gc.collect()
        found["at_rest"] = storages() - before
        found["resident"] = resident("VmRSS") - before_resident
        found["peak"] = resident("VmHWM") - before_resident
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    import hpctrain as ht

    out, backend = sys.argv[1:]
    comm = ht.init(backend)
    measure(1)  # what libraries allocate at their first use
    measure(3)
    results = {f"zero{zero}": measure(zero) for zero in (1, 2, 3)}
    results["sizes"] = {"parameters": PARAMETERS * FLOAT, "ranks": comm.size}
    Path(f"{out}-{comm.rank}.json").write_text(json.dumps(results))
