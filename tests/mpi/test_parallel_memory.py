"""A model that does not fit into one rank's memory trains on four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

LIMITED = Path(__file__).parent / "programs" / "parallel_limit.py"


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
