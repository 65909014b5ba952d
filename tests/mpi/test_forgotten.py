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


@pytest.mark.parametrize(
    "head", [pytest.param("import hpctrain as ht\ncomm = ht.init()\n", marks=pytest.mark.long), ""]
)
def test_a_script_that_forgets_a_line_is_told_so_at_its_first_steps_and_fails(hpctrain, tmp_path, head):
    trains = TRAINS.format(seed=1, distribute="", after="").replace("    for step", "    print('begins')\n    for step")
    (tmp_path / "script.py").write_text(head + trains)
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-ranks-trained-alone")
    log = without_marks((tmp_path / "run" / "logs" / "rank-0.log").read_text())
    assert log.index("begins") < log.index("each rank by itself" if not head else "each by itself") < log.index("\nend")


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "print('no training')",
        # Gradients that the script reduces itself.
        "import hpctrain as ht\ncomm = ht.init()\n"
        + TRAINS.format(
            seed=1, distribute="", after="model.bias.data = torch.from_numpy(comm.allreduce(model.bias.data.numpy()))"
        ),
    ],
)
def test_what_may_be_meant_is_no_failure(hpctrain, tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    result = hpctrain("run", "script.py", "-np", "2")
    assert result.returncode == 0, result.stdout


@pytest.mark.long
def test_ranks_that_differ_after_a_short_run_end_it_as_failed(hpctrain, tmp_path):
    """Fewer steps than between two checks, the model local to a function, and an end by sys.exit."""
    script = "import sys\nimport hpctrain as ht\ncomm = ht.init()\n" + TRAINS.format(
        seed=1,
        distribute="model, optimizer = ht.distribute(model, optimizer)",
        after="model.bias.data += comm.rank",
    )
    (tmp_path / "script.py").write_text(script + "\nsys.exit(0)\n")
    result = hpctrain("run", "script.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("failed", "HT-parameters-differ")
    assert re.search(r"step 3\b.*'bias'", summary["failure"]["message"])
