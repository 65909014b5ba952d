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
from support.refusals import codes, refused


@pytest.mark.parametrize(
    ("rank", "code", "line", "times"),
    [
        (0, "HT-rank-exception", "ValueError: of rank", 0),
        (1, "HT-rank-exception", "ValueError: of rank", 1),
        (1, "HT-of-test", "error[HT-of-test]: of rank", 0),
    ],
)
def test_the_end_of_a_failed_rank_is_shown_once(
    rank: int,
    code: str,
    line: str,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What rank 0 prints is shown as it comes; of another rank only the error tells, with its code once."""

    def fails(ready, directory, audience):
        audience.output(f"{line} 0\n")
        return Failure(
            code=code,
            message=f"rank {rank} failed",
            rank=rank,
            log=tmp_path / "log",
            lines=(f"{line} {rank}",),
        )

    monkeypatch.setattr(bench, "run_plan", fails)
    plan = make_plan(TrainingRequest(work=Script(path=Path("step.py")), ranks=1, backend="single"), this_machine())
    with refused(code) as caught:
        bench.run_program(plan, tmp_path, this_machine(), None, tmp_path / "out")
    assert str(caught.value).count(f"{line} {rank}") == times
    assert codes(str(caught.value)) == [code]
    assert f"{line} 0" in capsys.readouterr().err


def test_in_a_job_a_benchmark_is_of_this_machine_unless_hosts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    plans: list[Plan] = []

    def run(plan: Plan, *arguments: object) -> dict[str, object]:
        plans.append(plan)
        return {}

    monkeypatch.setattr(bench, "run_program", run)
    monkeypatch.setattr(bench, "first_launcher", lambda *arguments: None)
    here = this_machine().host
    bench.measure("step", None)
    bench.measure("loader_rates", 1, backend="single")
    bench.measure("step", None, hosts=HostOptions(hosts=f"{here}:3"))
    assert [[(host.host, host.slots) for host in plan.hosts] for plan in plans] == [
        [(here, 2)],
        [(here, 1)],
        [(here, 3)],
    ]
