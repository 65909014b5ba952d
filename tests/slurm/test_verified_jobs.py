"""Jobs that verify their work on their nodes before they run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm
from support.slurm.submitted_runs import TWO_NODES, Submit, jobs_of

pytestmark = pytest.mark.slow
pytest.importorskip("torch")

SCRIPT = """\
import sys
import torch
import hpctrain as ht
comm = ht.init()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (comm.size if sys.argv[1] == "scaled" else 1))
model, optimizer = ht.distribute(model, optimizer)
for x, y in ht.shard(torch.utils.data.DataLoader(data, batch_size=8)):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained to the end")
"""


@pytest.mark.parametrize(
    ("case", "state"), [pytest.param("right", "COMPLETED", marks=pytest.mark.long), ("scaled", "FAILED")]
)
def test_a_job_verifies_first_and_runs_what_is_equal(
    slurm: LocalSlurm, submit: Submit, slurm_hpctrain: Launch, tmp_path: Path, case: str, state: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = submit("script.py", *TWO_NODES, "--verify", "--run-dir", "run", "--wait", "--", case)
    (job,) = jobs_of(tmp_path / "run")
    log = (tmp_path / "run" / "logs" / f"job-{job}.log").read_text()
    assert slurm.job(job)["JobState"] == state, log
    verdict = json.loads((tmp_path / "run" / "verify" / "ranks" / "verify.json").read_text())
    plan = json.loads((tmp_path / "run" / "verify" / "ranks" / "plan.json").read_text())
    assert (verdict["equal"], len(plan["hosts"])) == (case == "right", 2)
    ran = (tmp_path / "run" / "logs" / "rank-0.log").exists()
    assert ran == (case == "right")
    if case == "right":
        assert result.returncode == 0, result.stdout
        assert "equal: 2 ranks" in log
        return
    assert result.returncode == 1
    assert slurm.job(job)["ExitCode"] == "3:0"
    assert "the learning rate" in log or "learning rate or" in log
    status = slurm_hpctrain("status", "run")
    assert "HT-verify-different" in status.stdout
