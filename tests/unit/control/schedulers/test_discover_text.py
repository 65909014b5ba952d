"""What Slurm prints, and the profile that comes of it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster
from hpctrain.control.schedulers.slurm.discover import (
    discover,
    profile_from,
    read_config,
)
from support.golden import check_text
from support.refusals import refused
from support.schedulers.discover_texts import A100, CONFIG, GPU, node, partition
from support.schedulers.slurm_programs import NO_CONTROLLER, install

TODAY = date(2026, 11, 21)


def found(nodes: str = A100, partitions: str = GPU, config: str = CONFIG, asked: str | None = None) -> Cluster:
    return profile_from(config, partitions, nodes, partition=asked, today=TODAY)


def test_a_cluster_of_equal_nodes() -> None:
    discovered = found()
    profile = discovered.profile
    assert (profile.name, profile.partition, profile.time) == ("alpine", "gpu", "1-00:00:00")
    assert (profile.node.gpus, profile.node.gpu_type) == (4, "a100")
    # 128 hardware threads.
    assert (profile.node.cores, profile.node.threads_per_core) == (64, 2)
    assert (profile.node.memory, profile.node.exclusive) == (None, False)
    assert (profile.requeue, profile.launcher, profile.fabric) == (True, "auto", None)
    check_text("discovered", "\n".join(discovered.findings))
    assert profile.source == "scontrol of Slurm 22.05.8 on 2026-11-21"


def test_the_default_partition_or_the_one_asked_for() -> None:
    partitions = partition("cpu", Default="YES") + partition("gpu", DefaultTime="01:00:00")
    nodes = node(8, Partitions="all,cpu", Gres="(null)", State="MIXED+CLOUD") + A100
    default = found(nodes, partitions)
    assert (default.profile.partition, default.profile.node.gpus, default.profile.node.gpu_type) == ("cpu", 0, None)
    asked = found(nodes, partitions, asked="gpu")
    assert (asked.profile.partition, asked.profile.time) == ("gpu", "01:00:00")
    assert found(nodes, partition("gpu")).profile.partition == "gpu"
    several = found(nodes, partitions, asked="gpu,cpu")
    assert (several.profile.partition, several.profile.node.gpus) == ("gpu,cpu", 4)
    with refused("HT-slurm-partition-not-usable", partition="cup"):
        found(nodes, partitions, asked="gpu,cup")


def test_nodes_of_several_kinds() -> None:
    v100 = {"Gres": "gpu:v100:2(S:0-1),nvme:3600", "CPUTot": "80", "CoresPerSocket": "40", "RealMemory": "384000"}
    nodes = (
        node(3, **v100)
        + node(5, Gres="gpu:a100:4(IDX:0-3)", CoresPerSocket="64", State="ALLOCATED")
        + node(9, **v100, State="IDLE+DRAIN")
        + node(1, **v100, State="DOWN*")
        + node(1, **v100, State="IDLE+NOT_RESPONDING")
    )
    discovered = found(nodes)
    assert (discovered.profile.node.gpu_type, discovered.profile.node.cores) == ("a100", 128)
    check_text("discovered-several-kinds", "\n".join(discovered.findings))


@pytest.mark.parametrize(
    ("gres", "gpus", "gpu_type"),
    [
        ("(null)", 0, None),
        ("", 0, None),
        ("gpu:2", 2, None),
        ("gpu:h100:8(S:0,1)", 8, "h100"),
        ("nvme:100,gpu:gh200:4", 4, "gh200"),
        ("gpu:a100:2,gpu:a100_1g.5gb:14", 2, "a100"),
        ("gpu:0", 0, None),
        ("craynetwork:4", 0, None),
        ("gpu", 1, None),
        ("gpu:gh200(S:0)", 1, "gh200"),
        ("gpu:tesla:no_consume:4,gpu_mem:81920", 4, "tesla"),
        ("gpu:no_consume:4", 4, None),
        ("gpu:1g.10gb:7(S:0-1),shard:28", 7, "1g.10gb"),
        ("gpu:a100_3g.20gb:2,gpu:a100_1g.5gb:7", 2, "a100_3g.20gb"),
        ("gpu:4k", 0, None),
    ],
)
def test_gpus_of_gres(gres: str, gpus: int, gpu_type: str | None) -> None:
    profile = found(node(Gres=gres)).profile
    assert (profile.node.gpus, profile.node.gpu_type) == (gpus, gpu_type)


@pytest.mark.parametrize(
    ("cpus", "sockets", "each", "cores", "threads"),
    [(128, 2, 32, 64, 2), (64, 2, 32, 64, 1), (60, 2, 32, 60, 1), (16, 1, 4, 4, 4)],
)
def test_cores_are_physical(cpus: int, sockets: int, each: int, cores: int, threads: int) -> None:
    line = node(CPUTot=str(cpus), Sockets=str(sockets), CoresPerSocket=str(each))
    profile = found(line).profile
    assert (profile.node.cores, profile.node.threads_per_core) == (cores, threads)


@pytest.mark.parametrize(
    ("changed", "limit", "cores"),
    [
        ({"CPUEfctv": "120"}, "UNLIMITED", 60),
        ({"CPUEfctv": ""}, "UNLIMITED", 64),
        ({}, "56", 28),
        ({}, "1", 1),
    ],
)
def test_cpus_that_a_job_cannot_have(changed: dict[str, str], limit: str, cores: int) -> None:
    discovered = found(node(**changed), partition("gpu", MaxCPUsPerNode=limit))
    assert discovered.profile.node.cores == cores
    assert any(f", {cores} cores" in line for line in discovered.findings)


@pytest.mark.parametrize(
    ("changed", "memory"),
    [
        ({"OverSubscribe": "EXCLUSIVE", "MaxMemPerNode": "400000"}, "400000M"),
        ({"OverSubscribe": "EXCLUSIVE", "MaxMemPerNode": "900000"}, "0"),
        ({"MaxMemPerNode": "400000"}, None),
    ],
)
def test_memory_that_a_job_can_have(changed: dict[str, str], memory: str | None) -> None:
    assert found(partitions=partition("gpu", Default="YES", **changed)).profile.node.memory == memory


def test_whole_nodes() -> None:
    profile = found(partitions=partition("gpu", Default="YES", OverSubscribe="EXCLUSIVE")).profile
    assert (profile.node.exclusive, profile.node.memory) == (True, "0")
    linear = found(config=CONFIG.replace("cons_tres", "linear"))
    assert linear.profile.node.exclusive
    check_text("discovered-whole-nodes", "\n".join(linear.findings))


def test_accounts_and_no_limit_of_time() -> None:
    discovered = found(partitions=partition("gpu", AllowAccounts="a,b", MaxTime="UNLIMITED"))
    assert discovered.profile.time is None
    assert discovered.findings[-1].startswith("accounts: only a,b")


@pytest.mark.parametrize(
    ("nodes", "partitions", "asked", "values", "choices"),
    [
        (A100, GPU, "gpus", {"partition": "gpus"}, "gpu"),
        (A100, GPU + partition("old", State="DOWN"), "old", {"partition": "old"}, "gpu"),
        (A100, partition("gpu", State="INACTIVE"), None, {}, ""),
        (A100, "", None, {}, ""),
        (A100, partition("a") + partition("b"), None, {}, "a, b"),
        (node(4, State="DRAINED"), GPU, None, {"partition": "gpu", "broken": 4}, ""),
        (A100, partition("x", Default="YES"), None, {"partition": "x", "broken": 0}, ""),
        ("slurm_load_node error\n", GPU, None, {"partition": "gpu", "broken": 0}, ""),
    ],
)
def test_no_usable_partition(
    nodes: str, partitions: str, asked: str | None, values: dict[str, object], choices: str
) -> None:
    with refused("HT-slurm-partition-not-usable", **values) as caught:
        found(nodes, partitions, asked=asked)
    assert caught.value.hint.endswith(choices)


def test_no_slurm_and_no_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, scontrol=NO_CONTROLLER)
    with refused("HT-slurm-command-failed") as caught:
        discover(None)
    assert "Unable to contact" in caught.value.values["reason"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("HT-slurm-not-here"):
        discover(None)


def test_settings() -> None:
    assert read_config(CONFIG)["SlurmctldHost[0]"] == "ctl(10.0.0.1)"


LINES = st.text(alphabet=st.sampled_from("gpu|idle:4=,()[]*-_/ \n\t\x00\x0baé²0123456789"), max_size=200)


@given(nodes=LINES | st.just(A100), partitions=LINES | st.just(GPU), config=LINES)
def test_any_text_gives_a_profile_or_an_error(nodes: str, partitions: str, config: str) -> None:
    try:
        discovered = found(nodes, partitions, config)
    except HpctrainError:
        return
    assert isinstance(discovered.profile, ClusterProfile)


@given(
    name=st.text("abcé²\U0001f600&-=\"'\\;$(", min_size=1, max_size=8),
    cluster=st.text(max_size=8),
    cores=st.integers(0, 999),
    time=st.text("0123456789:-UN", max_size=12),
    gpu=st.text("aH1:_.-", max_size=6),
)
def test_odd_names_give_a_profile_or_an_error(name: str, cluster: str, cores: int, time: str, gpu: str) -> None:
    config = f"ClusterName = {cluster}\n"
    try:
        line = node(Partitions=name, CPUTot=str(cores), CoresPerSocket=str(cores), Gres=f"gpu:{gpu}:1")
        found(line, partition(name, MaxTime=time), config)
    except HpctrainError as error:
        assert f"partition {name!r}" in error.message or error.code == "HT-slurm-partition-not-usable"
