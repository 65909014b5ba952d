"""Which nodes a run's next job leaves out, and what a job has used of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, EventWriter
from hpctrain.common.run.events.kinds import ExcludedEvent, FaultEvent
from hpctrain.common.run.records import RankRecord
from hpctrain.control.schedulers.slurm import job_nodes
from hpctrain.control.schedulers.slurm.job_nodes import busy, most_memory, nodes_to_exclude

DAY = 86400.0


def lost(hosts: str, *, ago: float = 0.0, code: str = "HT-host-lost") -> FaultEvent:
    return FaultEvent(time=time.time() - ago, rank=None, host=hosts, message=f"{hosts} failed", code=code)


@pytest.mark.parametrize(
    ("size", "needed", "expected"),
    [(40, 2, ("n3", "n1", "n2")), (11, 2, ("n3", "n1")), (4, 2, ("n3",)), (4, 4, ())],
)
def test_the_newest_failures_within_a_tenth_of_the_partition(
    size: int, needed: int, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "batch")
    monkeypatch.setattr(job_nodes, "program_output", lambda *_: "".join(f"n{node}\n" for node in range(size)))
    run, said = RunDirectory(tmp_path), list[str]()
    assert nodes_to_exclude(run, needed, said.append) is None
    with EventWriter(run.events) as events:
        events.emit(lost("n9", ago=2 * DAY))
        events.emit(lost("n1.site, n2", ago=30.0))
        # Errors of the training.
        events.emit(lost("n0", code="HT-rank-exception"))
        events.emit(lost("n0", code="HT-rank-killed"))
        events.emit(lost("elsewhere"))
        events.emit(ExcludedEvent(host="n3", message="open files: 100"))
    assert nodes_to_exclude(run, needed, said.append) == expected
    assert len(said) == 3
    recorded = {event.host for event in EventsFile(run.events).few(ExcludedEvent)}
    assert recorded == {"n3", *expected}


def record(rank: int, host: str, peak: int, cpu: float, ended: float = 110.0) -> RankRecord:
    used = {"peak_bytes": peak, "cpu_seconds": cpu, "ended": ended}
    return RankRecord(rank=rank, host=host, pid=1, started=100.0, status="done", **used)


def test_memory_is_summed_by_host_and_time_over_all_cpus() -> None:
    records = [record(0, "n1", 2, 10.0), record(1, "n1", 3, 5.0), record(2, "n2", 4, 1.0, ended=105.0)]
    assert most_memory(records) == ("n1", 5)
    assert busy(records, cpus=4) == 0.4
    # Ranks that were killed have recorded nothing.
    lost = [record(0, "n1", 0, 0.0, ended=0.0)]
    assert (most_memory(lost), busy(lost, cpus=4)) == (None, None)
