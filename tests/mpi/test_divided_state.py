"""State of models that are divided over ranks, by PyTorch's own means: saved under one mesh, read under others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hpctrain.common.checkpoints.find import verify
from hpctrain.common.checkpoints.layout import share_name
from hpctrain.common.checkpoints.read import read_state
from support.launching import Launch

torch = pytest.importorskip("torch")
PROGRAM = Path(__file__).parent / "programs" / "divided_state.py"
LAYOUTS = ["fsdp", "hsdp", "stages", "tp_fsdp"]


@pytest.mark.long
def test_saved_by_four_ranks_and_read_by_others(mpirun: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    mpirun(PROGRAM, 4, str(folder), "save")
    assert sorted(path.stem for path in folder.glob("*.pt")) == LAYOUTS
    for name in LAYOUTS:
        path = folder / name / "step-00000002"
        wanted = torch.load(folder / f"{name}.pt", weights_only=True)
        assert verify(path) == []
        # As one process reads it, for which no DTensor has to be made.
        state = read_state(path, 0, 1)[1]
        assert {key for key in state if not key.startswith(("guard.", "random."))} == wanted.keys()
        assert all(np.array_equal(state[key], tensor.numpy()) for key, tensor in wanted.items())
        assert all(state[key].dtype == tensor.numpy().dtype for key, tensor in wanted.items())
        # Where elements are on two ranks, each of four writes about a quarter; alone on theirs are 3, 3, 3 and 1 rows.
        sizes = [sum(each.nbytes for each in load_file(path / share_name(rank, 4)).values()) for rank in range(4)]
        assert max(sizes) < 1.5 * min(sizes) or name == "fsdp", (name, sizes)
    mpirun(PROGRAM, 3, str(folder), "restore")
    mpirun(PROGRAM, 2, str(folder), "restore")
