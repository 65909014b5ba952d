"""Scripts whose ranks train, each by itself, or are found to differ at the end."""

from __future__ import annotations

import json
import re

import pytest

from support.refusals import codes

pytest.importorskip("torch")

INIT = "import hpctrain as ht\ncomm = ht.init()\n"
TRAINS = """
import torch
def main():
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    {before}
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    {after}
main()
print("end")
"""
DISTRIBUTED = "model, optimizer = ht.distribute(model, optimizer)"


@pytest.mark.parametrize(
    ("head", "backend"),
    # The group that ht.init() makes over Gloo, on which a script may build, is no sign that this one does.
    [(INIT, "gloo"), ("", "mpi")],
)
def test_a_script_that_forgets_a_line_is_told_so_at_its_end_and_fails(hpctrain, tmp_path, head, backend):
    (tmp_path / "script.py").write_text(head + TRAINS.format(before="", after=""))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run", "--backend", backend)
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-ranks-trained-alone")
    # The first rank that tells it ends the others.
    logs = [log.read_text() for log in (tmp_path / "run" / "logs").glob("rank-*.log")]
    assert any(("each by itself" if head else "each rank by itself") in log for log in logs)


MEANT = {
    # Gradients that the script reduces itself.
    "mpi": TRAINS.format(
        before="", after="model.bias.data = torch.from_numpy(comm.allreduce(model.bias.data.numpy()))"
    ),
    # What is built on the group that ht.init() has made, which the script destroys. It sleeps as PyTorch frees a model
    # with the interpreter's lock held and joins Gloo's thread, which may still want that lock.
    "gloo": TRAINS.format(
        before="model = torch.nn.parallel.DistributedDataParallel(model)",
        after="torch.distributed.destroy_process_group(); import time; time.sleep(1)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("backend", MEANT)
def test_what_may_be_meant_is_no_failure(hpctrain, tmp_path, backend):
    (tmp_path / "script.py").write_text(INIT + MEANT[backend])
    result = hpctrain("run", "script.py", "-np", "2", "--backend", backend)
    assert result.returncode == 0, result.stdout


@pytest.mark.long
def test_ranks_that_differ_after_a_short_run_end_it_as_failed(hpctrain, tmp_path):
    """Fewer steps than between two checks, the model local to a function, and an end before the last line."""
    script = INIT + TRAINS.format(before=DISTRIBUTED, after="model.bias.data += comm.rank")
    (tmp_path / "script.py").write_text(f"import os\n{script}\nos._exit(0)\n")
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-parameters-differ")
    assert re.search(r"step 3\b.*'bias'", summary["failure"]["message"])


def test_ranks_that_compute_the_same_batches_are_told_so_once(hpctrain, tmp_path):
    (tmp_path / "script.py").write_text(INIT + TRAINS.format(before=DISTRIBUTED, after=""))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("compute the same gradients") == 1


# A metric is averaged, and the gradients are not.
ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
dist.barrier()
"""


def test_ranks_with_a_group_that_each_train_a_model_are_told_so(hpctrain, tmp_path):
    (tmp_path / "script.py").write_text(ALONE)
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    assert "HT-ranks-trained-alone" in codes(result.stdout)
