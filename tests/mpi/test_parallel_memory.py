"""A model that does not fit into one rank's memory trains on four, with the losses of one process without a limit."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

# Its state is 4 times its parameters, and what a rank may still take is 2.5 times as much. Of writable memory, whatever
# libraries have mapped besides; and what they take at their first use is not the model's.
_PROGRAM = """
import json, resource
from pathlib import Path
import torch
from torch import nn
import hpctrain as ht

def train(layers, width, steps):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    plan = ht.ParallelPlan(shard=[nn.Linear])
    model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=-1), plan=plan)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, width)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

torch.set_num_threads(1)
comm = ht.init("gloo")
train(2, 8, 2)
lines = Path("/proc/self/status").read_text().splitlines()
now = 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))
allowed = now + int(2.5 * 4 * 16 * (1024 * 1024 + 1024))
resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
found = train(16, 1024, 3)
if comm.rank == 0:
    Path("losses.json").write_text(json.dumps(found))
"""


@pytest.mark.long
def test_what_does_not_fit_into_one_rank_trains_on_four(mpirun, tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "losses.json"
    program.write_text(_PROGRAM)
    alone = mpirun(program, 1, check=False, cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="131072")
    assert alone.returncode != 0
    assert "can't allocate" in alone.stdout
    assert not out.exists()
    mpirun(program, 4, cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="131072")
    assert json.loads(out.read_text()) == pytest.approx(losses_of_one_process(), rel=1e-4)


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 1024)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
