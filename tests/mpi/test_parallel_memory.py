"""A model that does not fit into one rank's memory trains on four."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

# Its state is 4 times its parameters, and what a rank may still take is 2.5 times as much. Of writable memory, whatever
# libraries have mapped besides; and what they take at their first use is not the model's.
_PROGRAM = """
import resource
from pathlib import Path
import torch
from torch import nn
import hpctrain as ht

def train(layers, width, steps):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    plan = ht.ParallelPlan(shard=[nn.Linear])
    model, optimizer = ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=-1), plan=plan)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(4, width)) - 1).square().mean().backward()
        optimizer.step()

torch.set_num_threads(1)
comm = ht.init("gloo")
train(2, 8, 2)
lines = Path("/proc/self/status").read_text().splitlines()
now = 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))
allowed = now + int(2.5 * 4 * 16 * (1024 * 1024 + 1024))
resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
train(16, 1024, 3)
print("trained")
"""


@pytest.mark.long
def test_what_does_not_fit_into_one_rank_trains_on_four(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    alone = mpirun(program, 1, check=False, cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="131072")
    assert alone.returncode != 0
    assert "can't allocate" in alone.stdout
    assert mpirun(program, 4, cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="131072").stdout.count("trained") == 4
