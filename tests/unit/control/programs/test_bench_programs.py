"""The programs of ``hpctrain bench`` on ranks of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.run.plan import HostOptions, Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.programs import bench
from hpctrain.control.supervision.failure import Failure
from support.refusals import refused


@pytest.mark.parametrize(("rank", "times"), [(0, 0), (1, 1)])
def test_the_end_of_a_failed_rank_is_shown_once(
    rank: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rank 0 prints is shown as it comes; of another rank only the error tells."""

    def fails(ready, directory, audience):
        audience.line("ValueError: of rank 0")
        return Failure(
            code="HT-rank-exception",
            message=f"rank {rank} failed",
            rank=rank,
            log=tmp_path / "log",
            lines=(f"ValueError: of rank {rank}",),
        )

    monkeypatch.setattr(bench, "run_plan", fails)
    plan = make_plan(TrainingRequest(work=Script(path=Path("step.py")), ranks=1, backend="single"), this_machine())
    with refused("HT-rank-exception") as caught:
        bench.run_program(plan, tmp_path, this_machine(), None, tmp_path / "out")
    raised = "ValueError: of rank"
    assert str(caught.value).count(f"{raised} {rank}") == times
    assert f"{raised} 0" in capsys.readouterr().err


def test_in_a_job_a_benchmark_is_of_this_machine_unless_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    plans: list[Plan] = []

    def run(plan: Plan, *arguments: object) -> dict[str, object]:
        plans.append(plan)
        return {}

    monkeypatch.setattr(bench, "run_program", run)
    monkeypatch.setattr(bench, "prove_launcher", lambda *arguments: None)
    here = this_machine().host
    bench.measure("step", None)
    bench.measure("loader", 1, backend="single")
    bench.measure("step", None, hosts=HostOptions(hosts=f"{here}:3"))
    assert [[(host.host, host.slots) for host in plan.hosts] for plan in plans] == [
        [(here, 2)],
        [(here, 1)],
        [(here, 3)],
    ]
