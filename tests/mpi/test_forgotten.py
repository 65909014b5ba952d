"""Scripts whose ranks train, each by itself, or are found to differ at the end."""

from __future__ import annotations

import json
import re

import pytest

from support.refusals import codes

pytest.importorskip("torch")

TRAINS = """
import torch
def main():
    torch.manual_seed({seed})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    {distribute}
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    {after}
main()
print("end")
"""


INIT = "import hpctrain as ht\ncomm = ht.init()\n"


@pytest.mark.parametrize(
    ("head", "backend"),
    # The group that ht.init() makes over Gloo, on which a script may build, is no sign that this one does.
    [(INIT, "gloo"), ("", "mpi")],
)
def test_a_script_that_forgets_a_line_is_told_so_at_its_end_and_fails(hpctrain, tmp_path, head, backend):
    (tmp_path / "script.py").write_text(head + TRAINS.format(seed=1, distribute="", after=""))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run", "--backend", backend)
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-ranks-trained-alone")
    # The first rank that tells it ends the others.
    logs = [log.read_text() for log in (tmp_path / "run" / "logs").glob("rank-*.log")]
    assert any(("each by itself" if head else "each rank by itself") in log for log in logs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "backend"),
    [
        # Gradients that the script reduces itself.
        (
            INIT
            + TRAINS.format(
                seed=1,
                distribute="",
                after="model.bias.data = torch.from_numpy(comm.allreduce(model.bias.data.numpy()))",
            ),
            "mpi",
        ),
        # What is built on the group that ht.init() has made, which the script destroys.
        (
            INIT
            + TRAINS.format(
                seed=1,
                distribute="model = torch.nn.parallel.DistributedDataParallel(model)",
                after="torch.distributed.destroy_process_group()",
            ),
            "gloo",
        ),
    ],
)
def test_what_may_be_meant_is_no_failure(hpctrain, tmp_path, script, backend):
    (tmp_path / "script.py").write_text(script)
    result = hpctrain("run", "script.py", "-np", "2", "--backend", backend)
    assert result.returncode == 0, result.stdout


@pytest.mark.long
def test_ranks_that_differ_after_a_short_run_end_it_as_failed(hpctrain, tmp_path):
    """Fewer steps than between two checks, the model local to a function, and an end before the last line."""
    script = (
        "import os\n"
        + INIT
        + TRAINS.format(
            seed=1,
            distribute="model, optimizer = ht.distribute(model, optimizer)",
            after="model.bias.data += comm.rank",
        )
    )
    (tmp_path / "script.py").write_text(f"{script}\nos._exit(0)\n")
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-parameters-differ")
    assert re.search(r"step 3\b.*'bias'", summary["failure"]["message"])


DISTRIBUTED = "model, optimizer = ht.distribute(model, optimizer)"
# The same samples in every batch, which the ranks divide.
SHARDED = f"""{DISTRIBUTED}
    from torch.utils.data import DataLoader, TensorDataset
    for x, in ht.shard(DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return"""


@pytest.mark.parametrize(
    ("distribute", "told"),
    [(DISTRIBUTED, 1), pytest.param(SHARDED, 0, marks=pytest.mark.long)],
)
def test_ranks_that_compute_the_same_batches_are_told_so_once(hpctrain, tmp_path, distribute, told):
    (tmp_path / "script.py").write_text(INIT + TRAINS.format(seed=1, distribute=distribute, after=""))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("compute the same gradients") == told


GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    x = torch.randn(4, 8)
    {step}
    optimizer.step()
dist.barrier()
"""
# A metric is averaged, and the gradients are not.
ALONE = """loss = model(x).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())"""
# Each rank has one of two layers, of equal shapes.
STAGES = """y = x.requires_grad_()
    if rank == 0:
        y = model(x)
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        dist.recv(x.data, 0)
        model(x).square().mean().backward()
        dist.send(x.grad, 0)"""


@pytest.mark.parametrize(("step", "status"), [(ALONE, 1), pytest.param(STAGES, 0, marks=pytest.mark.long)])
def test_ranks_with_a_group_that_each_train_a_model_are_told_so(hpctrain, tmp_path, step, status):
    (tmp_path / "script.py").write_text(GROUP.format(step=step))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == status, result.stdout
    assert ("HT-ranks-trained-alone" in codes(result.stdout)) == bool(status)
