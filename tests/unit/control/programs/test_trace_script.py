"""Scripts that are run until their first step, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.programs.traced_script import trace_script
from support import needs
from support.refusals import refused

pytestmark = needs.pytorch

DIGITS = """
import sys

import torch

import hpctrain as ht
from hpctrain.worker.models.torch_digits import digits_cnn

ht.init()
model = digits_cnn()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.utils.data.TensorDataset(torch.rand(192, 1, 8, 8), torch.randint(0, 10, (192,)))
loader = torch.utils.data.DataLoader(samples, batch_size=int(sys.argv[1]))
model, optimizer = ht.distribute(model, optimizer)
model.eval()
model(torch.rand(5, 1, 8, 8))
model.train()
try:
    for x, y in ht.shard(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
finally:
    open("went_on", "w").close()
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "a script.py"
    path.write_text(text)
    return path


@pytest.mark.long
def test_a_script_is_traced_until_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = trace_script(write(tmp_path, DIGITS), ["48"])
    known = load_workload("digits_cnn")
    assert found.parameters == known.parameters
    assert [found.columns[key] for key in ("flops", "backward_flops")] == [
        known.columns[key] for key in ("flops", "backward_flops")
    ]
    assert (found.sample, found.outputs, found.registered) == (known.sample, known.outputs, known.registered)
    assert [each.name for each in found.layers] == [each.name for each in known.layers]
    # One step tells what is a sample's by its shape; the loss, one number, looks like a part of it.
    for one, other in zip(found.layers[:-1], known.layers[:-1], strict=True):
        assert (one.elements, one.saved_elements, one.saved_bytes) == (
            other.elements,
            other.saved_elements,
            other.saved_bytes,
        )
        assert (one.fused_backward_elements, one.operators) == (other.fused_backward_elements, other.operators)
        assert one.transient_backward_elements == pytest.approx(other.transient_backward_elements, abs=4)
    assert not (tmp_path / "went_on").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "code", "values"),
    [
        ("print('nothing')", "HT-script-no-optimizer-step", {}),
        (
            "import sys; print('here'); sys.exit('no data')",
            "HT-script-failed-before-step",
            {"status": 1, "end": "here\nno data"},
        ),
        # A process that it leaves behind, which has its output, is not waited for.
        ("import subprocess; subprocess.Popen(['sleep', '90'])", "HT-script-no-optimizer-step", {}),
        pytest.param(
            "import time; time.sleep(100)", "HT-script-no-step-in-time", {"seconds": 9}, marks=pytest.mark.thorough
        ),
    ],
)
def test_a_script_without_a_step_is_told(script: str, code: str, values: dict[str, object], tmp_path: Path) -> None:
    limit = 9 if "time.sleep" in script else 80
    with refused(code, **values) as caught:
        trace_script(write(tmp_path, script), ["48"], limit_seconds=limit)
    assert "a script.py" in caught.value.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (DIGITS.replace("optimizer)\nmodel.eval", "optimizer.state)\nmodel.eval"), "torch.optim.Optimizer"),
        (
            "import hpctrain as ht\nclass Model: ...\nModel.__module__ = 'keras.models'\nht.distribute(Model(), None)",
            "PyTorch",
        ),
    ],
)
def test_what_hpctrain_refuses_in_a_script_names_the_script(script: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=told) as caught:
        trace_script(write(tmp_path, script), ["48"])
    assert "a script.py" in caught.value.message


def test_a_missing_script_is_told(tmp_path: Path) -> None:
    with refused("HT-work-not-a-script"):
        trace_script(tmp_path / "none.py")
