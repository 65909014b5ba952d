"""What hosts are asked before ranks start there, and what is made of their answers; a script stands in for ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from hpctrain.common.cluster.interfaces import Interface
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots, Start
from hpctrain.control.launchers.command import Srun
from hpctrain.control.resuming.resume import plan_without
from hpctrain.control.supervision import host_questions, hosts_ready
from hpctrain.control.supervision.host_questions import Answer, own_addresses
from hpctrain.control.supervision.hosts_ready import ready_hosts
from support.refusals import refused

MPIRUN = MpiInstallation(flavour="open-mpi-5", version="5", mpirun=Path("mpirun"))
# n2 does what it is told, in a folder of its own; the shell of n3 greets; n4 hangs, n5 has no shell; n8 is switched off
# while it answers.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
echo "$1" >> asked
case $1 in
    n2) exec "$2" ;;
    n3) echo 'welcome to n3'; echo 'no news' >&2; exec "$2" ;;
    n4) exec sleep 600 ;;
    n5) echo 'This account is not available'; exit 1 ;;
    n6) echo 'ssh: connect to host n6 port 22: Connection refused' >&2; exit 255 ;;
    n7) echo 'Host key verification failed.' >&2; exit 255 ;;
    n8) echo hpctrain-answer:reached; echo 'Connection to n8 closed by remote host.' >&2; exit 255 ;;
esac
"""


@pytest.fixture(autouse=True)
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ssh").write_text(SSH)
    Path("ssh").chmod(0o700)
    Path("train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(host_questions, "_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr("socket.gethostname", lambda: "n1")


def plan(*hosts: str, start: Start = Start(), interface: str | None = None) -> Plan:
    return Plan(
        script=Script(path=Path("train.py")),
        backend="mpi",
        ranks=len(hosts),
        hosts=tuple(Slots(host=host, slots=1) for host in hosts),
        host_options=HostOptions(interface=interface),
        threads_per_rank=1,
        start=start,
    )


def ready(plan: Plan, launcher: object = MPIRUN, **variables: str) -> tuple[Plan, list[str]]:
    told: list[str] = []
    environment = {"PATH": os.environ["PATH"], **variables}
    made = ready_hosts(plan, launcher, Path("run"), notice=told.append, environment=environment)  # type: ignore[arg-type]
    return made, told


def faults_of(plan: Plan, **variables: str) -> list[str]:
    with refused("HT-hosts-unfit") as raised:
        ready(plan, **variables)
    assert raised.value.exit_code == 1
    lines: str = raised.value.values["lines"]
    return lines.splitlines()


def asked() -> list[str]:
    return sorted(Path("asked").read_text().split()) if Path("asked").exists() else []


@pytest.mark.slow
def test_hosts_that_are_ready() -> None:
    given = plan("n1", "n2", "n3")
    assert ready(given) == (given, [])
    # This one is asked without ssh, and nothing is left of what all were to see.
    assert asked() == ["n2", "n3"]
    assert sorted(os.listdir()) == ["asked", "ssh", "train.py"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("launcher", "start", "variables"),
    [
        (None, Start(), {}),
        (Srun(mpi="pmix"), Start(), {}),
        (MPIRUN, Start(), {"SLURM_JOB_ID": "7"}),
        (MPIRUN, Start(arguments=("--prtemca", "plm_ssh_agent", "my-ssh")), {}),
        (MPIRUN, Start(), {"HYDRA_LAUNCHER_EXEC": "my-ssh"}),
        # In the jobs of other schedulers.
        (MPIRUN, Start(), {"PBS_JOBID": "17"}),
        (MPIRUN, Start(), {"LSB_JOBID": "17"}),
        (MPIRUN, Start(), {"PE_HOSTFILE": "17"}),
    ],
)
def test_nobody_is_asked_whom_ssh_does_not_reach(launcher: object, start: Start, variables: dict[str, str]) -> None:
    ready(plan("n1", "n4", start=start), launcher, **variables)
    assert asked() == []


def test_ranks_of_this_host_need_no_ssh() -> None:
    ready(plan("n1.cluster", "localhost", "127.0.0.1"))
    assert asked() == []


@pytest.mark.slow
def test_faults_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for n1 and n2, which have to answer.
    monkeypatch.setattr(host_questions, "_ANSWER_SECONDS", 8.0)
    said = faults_of(plan("n1", "n2", "n4", "n5", "n6", "n7"))
    assert [line.split()[0] for line in said] == ["n4", "n5", "n6", "n7"]
    assert said[2].endswith(": port 22: Connection refused") and said[3].endswith(": Host key verification failed.")


def test_a_host_that_goes_while_it_answers() -> None:
    (fault,) = faults_of(plan("n1", "n8"))
    assert fault.startswith("n8 ") and fault.endswith(": Connection to n8 closed by remote host.")


def test_a_program_that_is_there_and_does_not_load_hpctrain() -> None:
    Path("python").write_text("#!/bin/sh\necho 'No module named {hpctrain}' >&2; exit 1\n")
    Path("python").chmod(0o700)
    (fault,) = faults_of(plan("n1", "n2", start=Start(python=str(Path("python").absolute()))))
    assert fault.startswith("n[1-2] ") and fault.endswith(": No module named {hpctrain}")


def answers(monkeypatch: pytest.MonkeyPatch, **changes: dict[str, object]) -> None:
    """Two hosts that say that all is well, but for ``changes``."""

    def answer(number: int, name: str) -> Answer:
        eth = Interface(
            name="eth0", up=True, host_only=False, addresses=(f"10.0.0.{number}",), networks=("10.0.0.0/24",)
        )
        docker = Interface(
            name="docker0", up=True, host_only=True, addresses=("172.17.0.1",), networks=("172.17.0.0/16",)
        )
        good = Answer(reached=True, program=True, version=hpctrain.__version__, interfaces=(eth, docker))
        return good.model_copy(update=changes.get(name, {}))

    def ask(plan: Plan, hosts: dict[str, bool], *_: object) -> dict[str, Answer]:
        return {host: answer(number, host) for number, host in enumerate(hosts, 1)}

    monkeypatch.setattr(hosts_ready, "ask_hosts", ask)


def test_the_networks_become_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    made, told = ready(plan("n1", "n2"))
    assert made.environment["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    assert len(told) == 1 and " eth0: docker0 " in told[0]


def test_and_stay_those_of_the_hosts_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    made, _ = ready(plan("n1", "n2", "n3"))
    fewer, _ = plan_without(made, ["n3"], Machine(host="n1", cores=2, frameworks=frozenset(), versions={}))
    assert [host.host for host in fewer.hosts] == ["n1", "n2"]
    assert fewer.environment == made.environment


@pytest.mark.parametrize(
    ("start", "interface", "variables"),
    [
        (Start(), "docker0", {}),
        (Start(), None, {"OMPI_MCA_btl_tcp_if_exclude": "docker0"}),
        (Start(environment={"OMPI_MCA_btl_tcp_if_include": "eth0"}), None, {}),
        (Start(arguments=("--mca", "btl_tcp_if_include", "eth0")), None, {}),
    ],
)
def test_what_a_user_chose_stays(
    start: Start, interface: str | None, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch)
    given = plan("n1", "n2", start=start, interface=interface)
    assert ready(given, **variables) == (given, [])


@pytest.mark.parametrize("variable", ["PRTE_MCA_oob_tcp_dynamic_ipv4_ports", "MPIEXEC_PORT_RANGE"])
def test_reachability_is_asked_for_unless_mpirun_has_ports_of_its_own(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    answers(monkeypatch, n2={"cut_off": True})
    ask = hosts_ready.ask_hosts

    def record_question(
        plan: Plan, hosts: dict[str, bool], folder: Path, paths: list[Path], own: list[str], *_: object
    ) -> object:
        tried.append(own)
        return ask(plan, hosts, folder, paths, own)

    monkeypatch.setattr(hosts_ready, "ask_hosts", record_question)
    monkeypatch.setattr(hosts_ready, "own_addresses", lambda interfaces: ("10.0.0.1", "10.1.0.1"))
    for variables in ({}, {variable: "40000-40999"}):
        (fault,) = faults_of(plan("n1", "n2"), **variables)
        assert fault.startswith("n2 ") and "firewall" in fault
    assert tried == [("10.0.0.1", "10.1.0.1"), ()]


def test_variables_that_a_user_set_for_one_library_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    made, _ = ready(plan("n1", "n2"), NCCL_SOCKET_IFNAME="ib0")
    assert "NCCL_SOCKET_IFNAME" not in made.environment
    assert made.environment["OMPI_MCA_btl_tcp_if_include"] == "eth0"


@pytest.mark.long
def test_ranks_are_seen_there(tmp_path: Path) -> None:
    """n2 is this host, where a process trains the run."""
    command = (sys.executable, "-c", "import sys; sys.stdin.read()", "hpctrain.worker.train", str(tmp_path / "run"))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        try:
            (fault,) = faults_of(plan("n1", "n2"))
            assert fault.startswith("n2 ") and fault.endswith(f": process {rank.pid}")
        finally:
            rank.kill()
    assert ready(plan("n1", "n2"))[1] == []


def test_packages_that_differ_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, n1={"versions": {"torch": "2.1", "numpy": "2.0"}}, n2={"versions": {"numpy": "2.0"}})
    _, told = ready(plan("n1", "n2"))
    assert told[0].startswith("warning: torch ") and " 2.1 on" in told[0]


def test_the_addresses_at_which_another_host_may_reach_this_one() -> None:
    def interface(name: str, *addresses: str, up: bool = True, host_only: bool = False) -> Interface:
        return Interface(name=name, up=up, host_only=host_only, addresses=addresses)

    found = [
        interface("lo", "127.0.0.1", "::1", host_only=True),
        interface("docker0", "172.17.0.1", host_only=True),
        interface("eth0", "10.0.0.1", "fe80::1", "2001:db8::1"),
        interface("eth1", "10.0.1.1", up=False),
        interface("ib0", "10.1.0.1"),
    ]
    assert own_addresses(found) == ("10.0.0.1", "2001:db8::1", "10.1.0.1")
