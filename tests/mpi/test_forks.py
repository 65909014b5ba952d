"""What a rank forks is no rank: it ends by itself, and leaves the run alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import FaultEvent, LogEvent
from hpctrain.common.run.records import read_records

PROGRAM = Path(__file__).parent / "programs" / "forks.py"
ENDED = {
    "status": 3,
    "text": 1,
    "end": 0,
    "exception": 1,
    "_exit": 5,
    "log": 0,
    "shutdown": 0,
    "place": 10,
    "barrier": 7,
    "reduction": 7,
    "handler": 0,
    "thread": 0,
    "grandchild": 8,
    "by hand": 6,
    "pool": [0, 1, 4, 9, 16],
    "loader": 190.0,
    "child lives": True,
}


@pytest.mark.parametrize(
    "backend",
    ["mpi", pytest.param("gloo", marks=pytest.mark.long), pytest.param("horovod", marks=pytest.mark.thorough)],
)
def test_forks_of_a_rank_end_by_themselves_and_leave_the_run_alone(hpctrain, tmp_path, backend):
    arguments = ("-np", "2", "--oversubscribe", "--backend", backend, "--run-dir", "run")
    result = hpctrain("run", str(PROGRAM), *arguments, timeout=110)
    assert result.returncode == 0, result.stdout
    for once in ("ValueError: raised in a fork", "exit handler of a fork", "thread of a fork"):
        assert result.stdout.count(once) == 1
    (ended,) = re.findall("^ended (.*)$", result.stdout, re.M)
    assert json.loads(ended) == ENDED
    directory = RunDirectory(tmp_path / "run")
    for rank, record in read_records(directory).items():
        assert record.status == "done"
        said = directory.log(rank).read_text()
        handled = re.findall(r"exit handler of process (\d+)", said)
        assert handled == re.findall(rf"rank {rank} in process (\d+) is done", said) and len(handled) == 1
    events = list(read_events(directory.events))
    assert [event.values for event in events if isinstance(event, LogEvent)] == [{"in_the_rank": 1.0}]
    assert not [event for event in events if isinstance(event, FaultEvent)]
