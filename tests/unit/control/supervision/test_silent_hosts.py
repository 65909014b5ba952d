"""Which hosts answer; scripts stand in for ssh and srun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.run.plan import Plan, Script, Slots, Start
from hpctrain.control.launchers.command import Launcher, Srun
from hpctrain.control.supervision.host_questions import silent_hosts

MPIRUN = MpiInstallation(flavour="open-mpi-5", version="5", mpirun=Path("mpirun"))
MACHINE = Machine(host="n1.cluster", cores=2, frameworks=frozenset(), versions={})
JOB = {"SLURM_JOB_ID": "17", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CONF": "/etc/slurm.conf"}
# n3 refuses, n4 hangs. A shell starts in little of the time that a busy machine leaves.
PROGRAM = """#!/bin/sh
echo "${0##*/} $* ${SLURM_NTASKS_PER_NODE+inherited}" >> asked
case " $* " in
    *n4*) exec sleep 600 ;;
    *n3*) exit 255 ;;
esac
"""


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.control.supervision.host_questions._SECONDS", 60.0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("ssh", "srun"):
        Path(name).write_text(PROGRAM)
        Path(name).chmod(0o700)


def asked() -> list[str]:
    return sorted(Path("asked").read_text().splitlines()) if Path("asked").exists() else []


def plan(*hosts: str, start: Start = Start()) -> Plan:
    return Plan(
        script=Script(path=Path("train.py")),
        ranks=len(hosts),
        hosts=tuple(Slots(host=host, slots=1) for host in hosts),
        threads_per_rank=1,
        start=start,
    )


def silent(plan: Plan, launcher: Launcher | None, **variables: str) -> tuple[str, ...]:
    return silent_hosts(plan, launcher, MACHINE, {"PATH": os.environ["PATH"], **variables})


@pytest.mark.slow
def test_by_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.control.supervision.host_questions._SECONDS", 5.0)
    assert silent(plan("n1", "n2", "n3", "n4"), MPIRUN) == ("n3", "n4")
    # This host is not asked.
    assert [line.split()[-3:] for line in asked()] == [["--", host, "true"] for host in ("n2", "n3", "n4")]
    assert all("-o BatchMode=yes" in line for line in asked())


@pytest.mark.parametrize("launcher", [MPIRUN, Srun(mpi="pmix")])
def test_by_srun_in_a_job(launcher: Launcher) -> None:
    """Whatever starts the ranks there: mpirun too reaches the nodes by srun."""
    assert silent(plan("n2", "n3"), launcher, **JOB) == ("n3",)
    assert [line.startswith("srun --overlap ") and line.endswith(" true ") for line in asked()] == [True] * 2
    assert "--nodelist=n2" in asked()[0]


@pytest.mark.parametrize(
    ("launcher", "start", "variables"),
    [
        (None, Start(), {}),
        (MPIRUN, Start(arguments=("--prtemca", "plm_ssh_agent", "my-ssh")), {}),
        (MPIRUN, Start(), {"HYDRA_LAUNCHER_EXEC": "my-ssh"}),
        (MPIRUN, Start(), {"PRTE_MCA_plm_ssh_agent": "my-ssh"}),
    ],
)
def test_where_nobody_can_be_asked_all_answer(
    launcher: Launcher | None, start: Start, variables: dict[str, str]
) -> None:
    assert silent(plan("n2", "n3", start=start), launcher, **variables) == ()
    assert asked() == []


def test_where_no_host_answers_that_is_not_the_hosts() -> None:
    """Unless the launcher has lost some: what reaches them may be another program, as a file of the MPI's says."""
    hosts = plan("n1", "n3")
    assert silent(hosts, MPIRUN) == ()
    assert asked() != []
    assert silent_hosts(hosts, MPIRUN, MACHINE, {"PATH": os.environ["PATH"]}, lost=("n3",)) == ("n3",)


def test_without_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert silent(plan("n2", "n3"), MPIRUN) == ()
