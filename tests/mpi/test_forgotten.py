"""Scripts whose ranks train, each by itself, or are found to differ at the end."""

from __future__ import annotations

import json
import re

import pytest

from hpctrain.common.run.streams import without_marks

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
    [pytest.param(INIT, "mpi", marks=pytest.mark.long), (INIT, "gloo"), ("", "mpi")],
)
def test_a_script_that_forgets_a_line_is_told_so_at_its_end_and_fails(hpctrain, tmp_path, head, backend):
    (tmp_path / "script.py").write_text(head + TRAINS.format(seed=1, distribute="", after=""))
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run", "--backend", backend)
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-ranks-trained-alone")
    log = without_marks((tmp_path / "run" / "logs" / "rank-0.log").read_text())
    assert ("each by itself" if head else "each rank by itself") in log


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "backend"),
    [
        ("print('no training')", "mpi"),
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
@pytest.mark.parametrize(("leave", "differ"), [("sys.exit(0)", 1), ("os._exit(0)", 1), ("os._exit(0)", 0)])
def test_ranks_that_differ_after_a_short_run_end_it_as_failed(hpctrain, tmp_path, leave, differ):
    """Fewer steps than between two checks, the model local to a function, and an end before the last line."""
    script = (
        "import os, sys\n"
        + INIT
        + TRAINS.format(
            seed=1,
            distribute="model, optimizer = ht.distribute(model, optimizer)",
            after=f"model.bias.data += {differ} * comm.rank",
        )
    )
    (tmp_path / "script.py").write_text(f"{script}\n{leave}\n")
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == differ, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if not differ:
        assert summary["status"] == "done"
        return
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-parameters-differ")
    assert re.search(r"step 3\b.*'bias'", summary["failure"]["message"])
