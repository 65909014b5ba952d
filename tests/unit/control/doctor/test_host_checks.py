"""The checks of one host: each fails on a machine built for it, passes on a healthy one, and knows what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.interfaces import Interface
from hpctrain.control.doctor import host_checks, network_checks
from hpctrain.control.doctor.host_checks import CHECKS
from hpctrain.control.doctor.host_facts import Host
from support.fake_machine import FakeMachine, full_machine

SECOND = "pci0000:b0/0000:b0:00.0/0000:b1:00.0"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What makes a check fail, and what its message has to say."""

    check: Callable[[Host], Check]
    found: str
    remedy: str
    build: Callable[[FakeMachine], object] = lambda machine: None
    environment: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    hosts: int = 1


def two_adapters(machine: FakeMachine, **second: Any) -> None:
    machine.adapter("mlx5_10", SECOND, **second)


def without(path: str) -> Callable[[FakeMachine], object]:
    return lambda machine: (machine.root / path).unlink()


FAULTS = {
    "memlock": Case(
        check=host_checks.memlock, changes={"memlock": (65536.0, 65536.0)}, found="64 KiB", remedy="limits.conf"
    ),
    "files": Case(
        check=host_checks.open_files, changes={"nofile": (1024.0, 65536.0)}, found="1,024", remedy="ulimit -n 4096"
    ),
    "shared memory": Case(
        check=host_checks.shared_memory, changes={"shared_memory": 64 << 20}, found="0.0671 GB", remedy="--shm-size=1g"
    ),
    "no shared memory": Case(
        check=host_checks.shared_memory, changes={"shared_memory": None}, found="no", remedy="mount"
    ),
    "NCCL, no such prefix": Case(
        check=network_checks.nccl_interfaces,
        environment={"NCCL_SOCKET_IFNAME": "eth0,ib"},
        found="ib is not here",
        remedy="export NCCL_SOCKET_IFNAME==eth0",
    ),
    "NCCL, containers left over": Case(
        check=network_checks.nccl_interfaces,
        build=lambda machine: machine.interface("virbr0"),
        environment={"NCCL_SOCKET_IFNAME": "^docker,lo"},
        found="no other host reaches virbr0",
        remedy="=eth0",
    ),
    "Gloo on the loopback": Case(
        check=network_checks.gloo_interfaces,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
        found="no other host reaches lo",
        remedy="export GLOO_SOCKET_IFNAME=eth0",
    ),
    "Open MPI, down": Case(
        check=network_checks.open_mpi_interfaces,
        build=lambda machine: machine.interface("eth1", up=False),
        environment={"OMPI_MCA_btl_tcp_if_include": "eth1"},
        found="eth1 is down",
        remedy="export OMPI_MCA_btl_tcp_if_include=eth0",
    ),
    "Open MPI, no such network": Case(
        check=network_checks.open_mpi_interfaces,
        environment={"OMPI_MCA_btl_tcp_if_include": "192.168.0.0/24"},
        found="192.168.0.0/24 is not here",
        remedy="=eth0",
    ),
    "Docker beside the network": Case(
        check=network_checks.automatic_interfaces,
        build=lambda machine: machine.interface("docker0"),
        hosts=2,
        found="docker0: known only on this host",
        remedy="--interface eth0",
    ),
    "loopback alone": Case(
        check=network_checks.automatic_interfaces,
        build=lambda machine: machine.interface("eth0", up=False),
        hosts=2,
        found="none for other hosts",
        remedy="ip link",
    ),
    "no cable": Case(
        check=network_checks.adapter_ports,
        build=lambda machine: two_adapters(machine, state="1: DOWN"),
        found="mlx5_10:1 DOWN",
        remedy="NCCL_IB_HCA=^=mlx5_10",
    ),
    "no subnet manager": Case(
        check=network_checks.adapter_ports,
        build=lambda machine: two_adapters(machine, state="2: INIT"),
        found="mlx5_10:1 INIT",
        remedy="opensm",
    ),
    "NCCL without InfiniBand": Case(
        check=network_checks.tcp_fallback,
        environment={"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
        found="NCCL_IB_DISABLE=1; NCCL_NET=Socket",
        remedy="unset NCCL_IB_DISABLE; unset NCCL_NET",
    ),
    "UCX over TCP": Case(
        check=network_checks.tcp_fallback,
        environment={"UCX_TLS": "tcp,sm,self"},
        found="UCX_TLS",
        remedy="unset UCX_TLS",
    ),
    "Open MPI without UCX": Case(
        check=network_checks.tcp_fallback, environment={"OMPI_MCA_pml": "ob1"}, found="ob1", remedy="unset OMPI_MCA_pml"
    ),
    "no verbs": Case(
        check=network_checks.tcp_fallback,
        build=without("dev/infiniband/uverbs0"),
        found="no device in /dev/infiniband",
        remedy="modprobe ib_uverbs",
    ),
    "ranks share a GPU": Case(
        check=host_checks.visible_gpus,
        changes={"visible": ("0", "0")},
        ranks=2,
        found="1 of 2 GPUs for 2 ranks",
        remedy="--gpus-per-node",
    ),
    "a GPU that is not here hides the next": Case(
        check=host_checks.visible_gpus,
        environment={"CUDA_VISIBLE_DEVICES": "7,0"},
        found="1 ranks see none",
        remedy="unset",
    ),
    "no peer memory": Case(
        check=host_checks.peer_memory,
        build=lambda machine: machine.write("proc/modules", "nvidia 1 0 - Live 0x0"),
        found="neither",
        remedy="modprobe nvidia-peermem",
    ),
    "DMA-BUF on an old kernel": Case(
        check=host_checks.peer_memory,
        changes={"modules": frozenset(), "driver": "NVIDIA UNIX Open Kernel Module", "kernel": (4, 18)},
        found="neither",
        remedy="modprobe nvidia-peermem",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_mended(name: str, tmp_path: Path) -> None:
    case = FAULTS[name]
    machine = full_machine(tmp_path)
    case.build(machine)
    check = case.check(machine.host(case.ranks, case.hosts, case.changes, **case.environment))
    assert check.status == "failed", check
    assert case.found in check.found
    assert case.remedy in check.remedy
    assert check.wanted


# The settings without which a check has nothing to judge.
HEALTHY = {
    "NCCL_SOCKET_IFNAME": "eth",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "NCCL_IB_HCA": "=mlx5_0,mlx5_4",
    "UCX_TLS": "rc,sm,self",
    "NCCL_IB_DISABLE": "0",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_healthy_host_passes(check: Callable[[Host], Check], tmp_path: Path) -> None:
    machine = full_machine(tmp_path)
    machine.adapter("mlx5_4", SECOND, layer="Ethernet")
    settings = {} if check is network_checks.automatic_interfaces else HEALTHY
    outcome = check(machine.host(ranks=2, hosts=2, **settings))
    assert outcome.status == "ok", outcome
    assert outcome.remedy == ""


NEEDS_NOTHING = (host_checks.open_files, host_checks.shared_memory)


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in NEEDS_NOTHING])
def test_a_bare_host_is_told_why_a_check_does_not_apply(check: Callable[[Host], Check], tmp_path: Path) -> None:
    outcome = check(FakeMachine(tmp_path).host())
    assert outcome.status == "not applicable", outcome
    assert outcome.found


def test_gpus_bound_to_tasks_one_by_one(tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task does it: each rank sees one, and no two the same."""
    host = full_machine(tmp_path).host(ranks=2, changes={"visible": ("0", "1")})
    assert host_checks.visible_gpus(host).status == "ok"
    uuids = full_machine(tmp_path / "uuids").host(ranks=2, changes={"visible": ("GPU-1a", "GPU-2b")})
    assert host_checks.visible_gpus(uuids).status == "ok"


def test_gpus_that_ranks_share(tmp_path: Path) -> None:
    machine = full_machine(tmp_path)
    shared = {"HPCTRAIN_SHARE_GPUS": "1"}
    assert host_checks.visible_gpus(machine.host(ranks=2, changes={"visible": ("0", "0")}, **shared)).status == "ok"
    assert host_checks.visible_gpus(machine.host(ranks=2, changes={"visible": ("0", "")}, **shared)).status == "failed"


def test_exact_names_of_nccl(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.interface("eth01", up=False)
    assert network_checks.nccl_interfaces(machine.host(NCCL_SOCKET_IFNAME="=eth0")).status == "ok"
    # As a prefix it takes the other one too.
    assert "eth01" in network_checks.nccl_interfaces(machine.host(NCCL_SOCKET_IFNAME="eth0")).found


def test_dma_buf_of_the_open_driver(tmp_path: Path) -> None:
    machine = full_machine(tmp_path)
    machine.write("proc/modules", "nvidia 1 0 - Live 0x0")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54")
    assert host_checks.peer_memory(machine.host()).status == "ok"


def test_a_second_port_without_a_cable_is_no_fault(tmp_path: Path) -> None:
    machine = full_machine(tmp_path)
    for name, value in {"link_layer": "InfiniBand", "state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}.items():
        machine.write(f"sys/class/infiniband/mlx5_0/ports/2/{name}", value)
    host = machine.host()
    assert network_checks.adapter_ports(host).status == "ok"


def test_an_adapter_that_the_user_leaves_out_may_be_down(tmp_path: Path) -> None:
    machine = full_machine(tmp_path)
    two_adapters(machine, state="1: DOWN")
    assert network_checks.adapter_ports(machine.host(NCCL_IB_HCA="^=mlx5_10")).status == "ok"
    assert network_checks.adapter_ports(machine.host(NCCL_IB_HCA="=mlx5_0")).status == "ok"
    assert network_checks.adapter_ports(machine.host(NCCL_IB_HCA="mlx5_1")).status == "failed"


def test_a_bridge_with_a_network_card_is_reachable(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.interface("br0")
    (machine.root / "sys/class/net/br0/bridge").mkdir()
    assert network_checks.gloo_interfaces(machine.host(GLOO_SOCKET_IFNAME="br0")).status == "failed"
    (machine.root / "sys/class/net/br0/brif/eth0/device").mkdir(parents=True)
    assert network_checks.gloo_interfaces(machine.host(GLOO_SOCKET_IFNAME="br0")).status == "ok"


def test_a_network_is_matched_by_address(tmp_path: Path) -> None:
    host = FakeMachine(tmp_path).host(OMPI_MCA_btl_tcp_if_include="10.1.0.0/16")
    addressed = tuple(
        Interface(name=one.name, up=one.up, host_only=one.host_only, addresses=("10.1.2.3", "fe80::1"))
        for one in host.interfaces
        if one.name == "eth0"
    )
    host.interfaces = addressed
    assert network_checks.open_mpi_interfaces(host).status == "ok"
