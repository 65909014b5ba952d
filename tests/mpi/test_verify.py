"""hpctrain verify on real ranks: right scripts are equal, and of wrong ones it names the tensor and the cause."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

# A script of which a case changes a line. 13 rows do not divide among two ranks.
SCRIPT = """\
import torch
from torch import nn
import hpctrain as ht
comm = ht.init()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(52, 8), torch.randint(0, 3, (52,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ht.distribute(model, optimizer)
loader = ht.shard(torch.utils.data.DataLoader(data, batch_size=13, shuffle=True))
criterion = nn.CrossEntropyLoss()  # a module too, but no model that gets samples
for epoch in range(3):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
# As Lightning does: only what the wrapper holds trains, a part is called alone first, and the optimizer gets a closure.
DDP = """\
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(52, 8), torch.randint(0, 3, (52,)))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
model.eval(), model.module.train()
with torch.no_grad():
    model.module[0](data.tensors[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, 5, sampler=torch.utils.data.DistributedSampler(data))
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""
# Its mesh is its own; on one process it has one stage.
PIPELINE = """\
import torch
from torch import nn
import hpctrain as ht
comm = ht.init()
torch.manual_seed(0)
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(4)})
    def forward(self, x):
        for block in self.blocks.values():
            x = torch.tanh(block(x)) + x
        return x
model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(output, target):
    return nn.functional.cross_entropy(output, target)
pipeline = ht.Pipeline(model, optimizer, loss_of, mesh=ht.mesh(pp=2), schedule="interleaved_1f1b", micro_batches=4)
data = torch.utils.data.TensorDataset(torch.randn(52, 8), torch.randint(0, 3, (52,)))
for x, y in ht.shard(torch.utils.data.DataLoader(data, batch_size=13, shuffle=True)):
    optimizer.zero_grad()
    pipeline.step(x, y)
    optimizer.step()
"""


def _verify(hpctrain: Launch, folder: Path, *words: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return hpctrain("verify", "script.py", "-np", "2", "--run-dir", "verified", *words)


def test_a_right_script_is_equal(hpctrain: Launch, tmp_path: Path) -> None:
    done = _verify(hpctrain, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "equal: 2 ranks compute what one process computes, in 5 steps" in done.stdout
    verdict = json.loads((tmp_path / "verified" / "ranks" / "verify.json").read_text())
    assert 0 < verdict["largest_difference"] < 1e-5 and 0 < verdict["noise"] < 1e-5
    said = hpctrain("report", "verified/ranks")
    assert said.returncode == 0, said.stdout
    page = (tmp_path / "verified" / "ranks" / "report.html").read_text()
    assert "equal: 2 ranks compute" in page


def _verdict(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{\n") : done.stdout.rindex("}") + 1])
    return found


def test_a_sum_in_place_of_a_mean_is_named(hpctrain: Launch, tmp_path: Path) -> None:
    script = SCRIPT.replace("optimizer.zero_grad()", "loss = comm.size * loss; optimizer.zero_grad()", 1)
    done = _verify(hpctrain, tmp_path, "--json", script=script)
    assert done.returncode == 3, done.stdout
    verdict = _verdict(done)
    assert (verdict["equal"], verdict["ranks"], verdict["steps"]) == (False, 2, 5)
    first = verdict["first"]
    assert (first["step"], first["kind"], first["name"], first["shape"]) == (1, "gradient", "0.weight", [16, 8])
    assert "2 times" in verdict["cause"]
    assert first["factor"] == pytest.approx(2) == first["ranks"] / first["one_process"]


@pytest.mark.long
def test_dropout_is_named(hpctrain: Launch, tmp_path: Path) -> None:
    script = SCRIPT.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout(0.3)", 1)
    done = _verify(hpctrain, tmp_path, script=script)
    assert done.returncode == 3 and "Dropout" in done.stdout, done.stdout


@pytest.mark.long
def test_gradients_of_ddp_are_compared_with_the_means_of_the_ranks(hpctrain: Launch, tmp_path: Path) -> None:
    done = _verify(hpctrain, tmp_path, script=DDP)
    assert done.returncode == 0, done.stdout
    assert "are the means of what the ranks computed" in done.stdout


def test_a_script_that_ends_early_and_asks_for_input_is_compared_as_far_as_it_gets(
    hpctrain: Launch, tmp_path: Path
) -> None:
    """Its input is at its end at once, whatever this command's own is."""
    begun = 'import os, sys\nassert sys.stdin.read() == "" and os.environ["HPCTRAIN_VERIFY"] == "1"\n'
    done = _verify(hpctrain, tmp_path, script=begun + SCRIPT.replace("range(3)", "range(1)"))
    assert done.returncode == 0, done.stdout
    assert "in 4 steps" in done.stdout and "the work ended after 4 steps" in done.stdout


@pytest.mark.long
def test_a_pipeline_on_a_mesh_of_the_scripts_own(hpctrain: Launch, tmp_path: Path) -> None:
    wrong = "return 2 ** (comm.size > 1) * nn.functional"
    done = _verify(hpctrain, tmp_path, "--json", script=PIPELINE.replace("return nn.functional", wrong))
    assert done.returncode == 3, done.stdout
    first = _verdict(done)["first"]
    assert first["name"] == "blocks.0.weight" and first["factor"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ("raise SystemExit(0)", "HT-verify-nothing-compared", "on one process"),
        ("raise ValueError('no data')", "HT-verify-run-failed", "on one process: rank 0"),
    ],
)
def test_what_makes_no_step_fails(hpctrain: Launch, tmp_path: Path, change: str, code: str, where: str) -> None:
    done = _verify(hpctrain, tmp_path, script=SCRIPT.replace("torch.manual_seed(0)", change, 1))
    assert done.returncode == 1, done.stdout
    assert codes(done.stdout) == [code] and where in done.stdout


@pytest.mark.long
def test_a_rank_that_dies_later_is_a_failure_and_no_difference(hpctrain: Launch, tmp_path: Path) -> None:
    """The steps until then are equal."""
    dies = "for step, (x, y) in enumerate(loader):\n        if comm.rank == 1 and step == 2: os.kill(os.getpid(), 9)"
    done = _verify(hpctrain, tmp_path, script="import os\n" + SCRIPT.replace("for x, y in loader:", dies, 1))
    assert done.returncode == 1, done.stdout
    assert codes(done.stdout) == ["HT-verify-run-failed"] and "rank 1" in done.stdout
