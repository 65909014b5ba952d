"""Ranks that die while a checkpoint is written, or given up: the others go on, and the last one is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.checkpoints.find import Newest, newest_whole
from hpctrain.common.checkpoints.layout import hidden
from hpctrain.common.run.events import read_events
from support.launching import Launch

pytest.importorskip("torch")
pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parent / "programs" / "saves_without_a_rank.py"
LEFT = {"publish": [1, 2, 3, 4], "share": [1, 2, 3], "abandon": [1]}


@pytest.fixture(scope="module")
def folder(mpirun: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    options = ("--with-ft", "ulfm")
    # Nothing here is to wait for the limit of collectives, nor for that of a share, which is half of it.
    result = mpirun(PROGRAM, 5, str(folder), options=options, check=False, HPCTRAIN_TIMEOUT="1000")
    assert "abandon done" in result.stdout, result.stdout
    return folder


@pytest.mark.parametrize("case", LEFT)
def test_the_last_checkpoint_is_there(folder: Path, case: str) -> None:
    run = folder / case
    assert newest_whole(run / "checkpoints") == Newest(iteration=12)
    assert hidden(run / "checkpoints") == []
    events = list(read_events(run / "events.jsonl"))
    assert [event.iteration for event in events if event.event == "step"] == list(range(1, 13))
    assert [event.iteration for event in events if event.event == "checkpoint"] == [4, 8, 12]
    assert events[-1].event == "end"


@pytest.mark.parametrize("case", LEFT)
def test_the_others_end_alike(folder: Path, case: str) -> None:
    ends = {int(path.stem.partition("-")[2]): np.load(path)["parameters"] for path in (folder / case).glob("end-*.npz")}
    assert sorted(ends) == LEFT[case]
    for parameters in ends.values():
        np.testing.assert_array_equal(parameters, ends[1])
