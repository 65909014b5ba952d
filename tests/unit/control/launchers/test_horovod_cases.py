"""The cases that the tests of Horovod 0.28.1's own launcher cover (test/single/test_run.py), for hpctrain's commands.

What differs on purpose:

- Horovod names every variable of its caller with ``-x``, save shell functions and a few others. Here ranks get the
  variables of the plan by value; Hydra and srun pass their own environment by themselves.
- Horovod switches ``-mca pml ob1 -mca btl ^openib`` on, against InfiniBand through UCX; here Open MPI chooses.
- From 64 hosts on it starts all ssh connections from one host (``plm_rsh_no_tree_spawn``, ``plm_rsh_num_concurrent``),
  a workaround for one machine (Summit). Here Open MPI's tree stays; users can pass both options.
- Its NCCL_SOCKET_IFNAME is a prefix: eth1 takes eth10 too. Here the name is exact.
- It refuses hosts with different slots under Intel MPI and MPICH; here they get what those read such hosts from.
- jsrun of LSF clusters is not started.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.mpi import Flavour, MpiInstallation
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.plan import HostOptions, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.launchers.command import Command
from hpctrain.control.launchers.command_line import LaunchSite, launch_command
from hpctrain.control.planning.planner import make_plan

MACHINE = Machine(host="login", cores=8, frameworks=frozenset({"torch"}), versions={})
OPEN_MPI: tuple[Flavour, ...] = ("open-mpi-4", "open-mpi-5")
HYDRA: tuple[Flavour, ...] = ("mpich-hydra", "intel-mpi")


def command(flavour: Flavour, hosts: str, *, interface: str | None = None, **start: object) -> Command:
    arranged, _ = arrange(HostOptions(hosts=hosts, interface=interface), MACHINE.host, None, {})
    plan = make_plan(
        TrainingRequest(work=load_recipe("digits"), backend="horovod", start=Start(**start)), MACHINE, arranged
    )
    mpi = MpiInstallation(flavour=flavour, version="0", mpirun=Path("mpirun"), mpicc=None, mpicxx=None)
    return launch_command(plan, Path("/run"), mpi, LaunchSite(python=Path("python"), cores=MACHINE.cores, root=True))


def has(made: Command, *words: str) -> bool:
    """Whether the launcher's options have these one after the other."""
    given = made.launcher
    return any(given[start : start + len(words)] == words for start in range(len(given)))


@pytest.mark.parametrize("flavour", [*OPEN_MPI, *HYDRA])
def test_minimal(flavour: Flavour) -> None:
    made = command(flavour, "localhost:2")
    is_open_mpi = flavour in OPEN_MPI
    assert has(made, "-np" if is_open_mpi else "-n", "2")
    assert has(made, "--allow-run-as-root") == is_open_mpi
    assert has(made, "--host", "localhost:2") == is_open_mpi
    assert has(made, "-machinefile", "/run/hostfile") == (flavour == "intel-mpi")
    assert has(made, "-hosts", "localhost:2") == (flavour == "mpich-hydra")


@pytest.mark.parametrize("flavour", OPEN_MPI)
def test_ranks_fill_one_host_after_the_other_unbound(flavour: Flavour) -> None:
    made = command(flavour, "n1:16,n2:16")
    assert has(made, "--bind-to", "none", "--map-by", "slot")


@pytest.mark.parametrize("flavour", OPEN_MPI)
def test_a_large_cluster(flavour: Flavour) -> None:
    made = command(flavour, "n[001-064]:1")
    assert has(made, "--host", ",".join(f"n{number:03}:1" for number in range(1, 65)))
    assert not any("tree_spawn" in word or "num_concurrent" in word for word in made.launcher)


@pytest.mark.parametrize("flavour", [*OPEN_MPI, *HYDRA])
def test_interfaces_and_variables_and_further_arguments(flavour: Flavour) -> None:
    users = {"env1": "val1", "env2": "a value"}
    further = ("--extra", "of the user")
    made = command(flavour, "n1:1", interface="eth0,eth1", environment=users, arguments=further)
    passed = {**users, "NCCL_SOCKET_IFNAME": "=eth0,eth1", "OMPI_MCA_btl_tcp_if_include": "eth0,eth1"}
    for name, value in passed.items():
        assert has(made, *(("-x", f"{name}={value}") if flavour in OPEN_MPI else ("-genv", name, value)))
    assert made.launcher[-2:] == further


@pytest.mark.parametrize("flavour", [*OPEN_MPI, *HYDRA])
def test_nothing_of_the_shell_leaks(flavour: Flavour, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASH_FUNC_module%%", "OLDPWD", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "leaked")
    assert not any("leaked" in word for word in command(flavour, "n1:1").arguments)


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH"])
def test_the_launcher_itself_has_the_callers_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = command("open-mpi-5", "n1:1")
    monkeypatch.delenv(name, raising=False)
    assert name not in made.environment_from(os.environ)
    monkeypatch.setenv(name, "callers")
    assert made.environment_from(os.environ)[name] == "callers"


@pytest.mark.parametrize(
    ("flavour", "words", "file"),
    [
        ("open-mpi-5", ("--host", "worker-0:1,worker-1:2"), None),
        ("mpich-hydra", ("-hosts", "worker-0:1,worker-1:2"), None),
        ("intel-mpi", ("-machinefile", "/run/hostfile"), "worker-0:1\nworker-1:2\n"),
    ],
)
def test_hosts_that_differ(flavour: Flavour, words: tuple[str, ...], file: str | None) -> None:
    made = command(flavour, "worker-0:1,worker-1:2")
    assert has(made, *words)
    assert made.files == ({} if file is None else {Path("/run/hostfile"): file})


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("172.31.32.7 slots=8\n172.31.33.9 slots=8\n")
    arranged, _ = arrange(HostOptions(hostfile=path), MACHINE.host, None, {})
    assert [(host.host, host.slots) for host in arranged.slots] == [("172.31.32.7", 8), ("172.31.33.9", 8)]


@pytest.mark.parametrize(
    ("hosts", "ranks", "assigned"),
    [
        ("worker-0:2,worker-1:2", 4, [("worker-0", 2), ("worker-1", 2)]),
        ("worker-0:2,worker-1:2", 3, [("worker-0", 2), ("worker-1", 1)]),
        ("worker-0:2,worker-1:2", 2, [("worker-0", 2)]),
        ("worker-0:1,worker-1:2", 3, [("worker-0", 1), ("worker-1", 2)]),
    ],
)
def test_assignments(hosts: str, ranks: int, assigned: list[tuple[str, int]]) -> None:
    arranged, _ = arrange(HostOptions(hosts=hosts), MACHINE.host, ranks, {})
    assert [(host.host, host.slots) for host in arranged.slots] == assigned
