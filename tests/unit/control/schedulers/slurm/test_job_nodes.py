"""Which nodes a run's next job leaves out, and what a job has used of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, EventWriter
from hpctrain.common.run.events.kinds import ExcludedEvent, FaultEvent
from hpctrain.common.run.records import RankRecord
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.slurm import job_nodes
from hpctrain.control.schedulers.slurm.job_nodes import busy, faults_of_nodes, most_memory, nodes_to_exclude

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
    monkeypatch.setattr(
        job_nodes, "program_output", lambda *_: "".join(f"n{node} (null) (null)\n" for node in range(size))
    )
    run, said, request = RunDirectory(tmp_path), list[str](), JobRequest(name="run")
    assert nodes_to_exclude(run, request, needed, said.append) is None
    with EventWriter(run.events) as events:
        events.emit(lost("n9", ago=2 * DAY))
        events.emit(lost("n1.site, n2", ago=30.0))
        # Errors of the training.
        events.emit(lost("n0", code="HT-rank-exception"))
        events.emit(lost("n0", code="HT-rank-killed"))
        events.emit(lost("elsewhere"))
        events.emit(ExcludedEvent(host="n3", message="open files: 100"))
    assert nodes_to_exclude(run, request, needed, said.append) == expected
    assert len(said) == 3
    recorded = {event.host for event in EventsFile(run.events).few(ExcludedEvent)}
    assert recorded == {"n3", *expected}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("n1", "n2")),
        ({"sbatch": {"nodelist": "n[0-3]"}}, ()),
        ({"sbatch": {"res": "mine"}}, ()),
        ({"sbatch": {"mail-type": "END"}}, ("n1", "n2")),
        ({"constraint": "new"}, ("n1",)),
        ({"constraint": "new", "nodes": 4}, ()),
        ({"constraint": "new&fast"}, ()),
        ({"gpus_per_node": 1}, ("n2",)),
        ({"gpus_per_node": 1, "gpu_type": "a100"}, ("n2",)),
        ({"gpus_per_node": 1, "gpu_type": "a10"}, ()),
    ],
)
def test_a_job_is_left_the_nodes_that_it_can_run_on(
    asked: dict[str, Any], expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twenty nodes four are new, and two have GPUs."""
    rows = [
        "n0 fast,new (null)",
        "n1 new (null)",
        "n2 old gpu:a100:4(S:0-1)",
        "n3 old gpu:a100:4",
        "n4 new x",
        "n5 new x",
    ]
    rows += [f"n{number} old (null)" for number in range(6, 20)]
    monkeypatch.setenv("SLURM_JOB_PARTITION", "batch")
    monkeypatch.setattr(job_nodes, "program_output", lambda *_: "\n".join(rows))
    run, request = RunDirectory(tmp_path), JobRequest(name="run", **asked)
    with EventWriter(run.events) as events:
        events.emit(lost("n2", ago=2.0))
        events.emit(lost("n1", ago=1.0))
    assert nodes_to_exclude(run, request, request.nodes, lambda _: None) == expected


@pytest.mark.parametrize(
    ("failed", "expected", "said"),
    [
        # Of the nodes n0, n1 …, by the checks that fail on each.
        ([["open files"], []], ["open files", ""], []),
        ([["home folder", "open files"], ["import of torch"]], ["open files", ""], ["home folder", "import of torch"]),
        ([["Horovod GPUs"], []], ["", ""], ["Horovod GPUs"]),
        ([["open files", "memlock"], ["open files"]], ["memlock", ""], ["open files"]),
        ([["open files"]], ["open files"], []),
        ([None, []], ["hpctrain doctor", ""], []),
        ([None, None], ["", ""], ["hpctrain doctor"]),
    ],
)
def test_a_node_is_left_out_for_its_own_fault(
    failed: list[list[str] | None], expected: list[str], said: list[str], tmp_path: Path
) -> None:
    answers = {f"n{number}": tmp_path / str(number) for number in range(len(failed))}
    for answer, names in zip(answers.values(), failed, strict=True):
        if names is not None:
            checks = [{"name": name, "status": "failed", "found": "0", "wanted": "1"} for name in names]
            checks.append({"name": "versions", "status": "ok", "found": "", "wanted": ""})
            # As a prolog and an epilog print.
            answer.write_text(f"module loaded\n{json.dumps({'checks': checks}, indent=2)}\nbye\n")
    told = list[str]()
    faults = faults_of_nodes(answers, told.append)
    assert [*faults] == [*answers]
    for fault, name in zip(faults.values(), expected, strict=True):
        assert fault.startswith(name) and bool(fault) == bool(name) and ";" not in fault
    assert [line.removeprefix("hpctrain: ").partition(":")[0].partition(" gave")[0] for line in told] == said


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
