"""What a rank holds of parameters, gradients and optimizer state is what ZeRO's formulas say (arXiv 1910.02054, 3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "parallel_memory.py"
LIMITED = PROGRAM.with_name("parallel_limit.py")


@pytest.mark.thorough
def test_memory_is_that_of_the_formulas(mpirun, tmp_path):
    ranks = 4
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), "gloo", MALLOC_MMAP_THRESHOLD_="131072")
    for rank in range(ranks):
        found = json.loads((tmp_path / f"out-{rank}.json").read_text())
        parameters = gradients = found["sizes"]["parameters"]
        state = 2 * parameters
        for key in ("at_rest", "resident"):
            assert found["zero1"][key] == pytest.approx(parameters + gradients + state / ranks, rel=0.1)
            assert found["zero2"][key] == pytest.approx((parameters + gradients + state) / ranks, rel=0.1)
            assert found["zero3"][key] == pytest.approx((parameters + gradients + state) / ranks, rel=0.1)
        # FSDP2 keeps whole parameters from the forward to the backward pass, beside this rank's part of them; between
        # two steps it has the parts alone, which is less than the formula.
        whole = parameters + (gradients + state) / ranks
        assert found["zero2"]["after_forward"] == pytest.approx(whole - gradients / ranks + parameters / ranks, rel=0.1)
        assert found["zero3"]["after_forward"] < found["zero2"]["after_forward"] / 2


@pytest.mark.long
def test_what_does_not_fit_into_one_rank_trains_on_four(mpirun, tmp_path):
    out = tmp_path / "losses.json"
    alone = mpirun(LIMITED, 1, str(out), check=False, MALLOC_MMAP_THRESHOLD_="131072")
    assert alone.returncode != 0
    assert "can't allocate" in alone.stdout
    assert not out.exists()
    mpirun(LIMITED, 4, str(out), MALLOC_MMAP_THRESHOLD_="131072")
    assert json.loads(out.read_text()) == pytest.approx(losses_of_one_process(), rel=1e-4)


def losses_of_one_process() -> list[float]:
    """The same training without hpctrain and without a limit."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 1024)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
