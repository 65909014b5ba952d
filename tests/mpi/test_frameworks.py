"""Scripts of Lightning, Fabric, Accelerate and the Trainer on the ranks of a run: the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.comers import cells
from support.launching import Launch

pytest.importorskip("torch")
if reason := cells.missing():
    pytest.skip(reason, allow_module_level=True)

LIMITED = {**cells.OF_FRAMEWORKS, "HPCTRAIN_TIMEOUT": "120"}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.long
def test_losses_are_those_of_one_process(hpctrain: Launch, tmp_path: Path, ranks: int) -> None:
    options = ("-np", str(ranks), "--backend", "mpi", "--oversubscribe", "--run-dir", "run")
    result = hpctrain("run", str(cells.SCRIPTS / "frameworks.py"), *options, **LIMITED)
    assert result.returncode == 0, result.stdout
    # The Trainer adds the losses of an epoch up in float32; the training itself is in float64.
    assert cells.all_losses(result.stdout) == pytest.approx(4 * [*cells.alone("torch").values()], rel=0, abs=1e-6)
    # The group has the name that the script asked for, of which hpctrain is none.
    assert f"group of {ranks} over " in result.stdout and "over hpctrain" not in result.stdout
    assert "each rank by itself" not in result.stdout
    assert [path.name for path in tmp_path.glob("prepared-*")] == ["prepared-by-0"]
    # Of the first optimizer that makes one.
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["iteration"] for event in events if event["event"] == "step"] == [*range(1, 11)]
