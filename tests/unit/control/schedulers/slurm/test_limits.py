"""Requests beyond what the partitions of a discovered cluster allow."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.order import requested
from hpctrain.control.schedulers.scheduler import Cluster
from hpctrain.control.schedulers.slurm.limits import Limits, check_limits, read_limits
from support.refusals import refused
from support.schedulers.job_scripts import PLAIN

NAMED = PLAIN.model_copy(update={"partition": "batch"})
HOUR = Limits(partition="batch", total=4, least=2, most=3, time="01:00:00", gpus=4)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Slurm's programs: none, so that nothing is known of any QOS."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install_sacctmgr(folder: Path, text: str) -> None:
    path = folder / "sacctmgr"
    path.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    path.chmod(0o755)


def ask(*partitions: Limits, **asked: object) -> tuple[str, ...]:
    check = partial(check_limits, partitions=partitions or (HOUR,))
    return requested(Cluster(profile=NAMED, check=check), "x", {"nodes": 2, **asked}).doubts


@pytest.mark.parametrize("asked", [{}, {"time": "60"}, {"time": "0:59:01"}, {"nodes": 3, "time": "1:00:00"}])
def test_what_is_within(asked: dict[str, object]) -> None:
    assert ask(**asked) == ()


@pytest.mark.parametrize(
    ("asked", "code", "limit"),
    [
        ({"nodes": 9}, "HT-job-too-many-nodes", {"total": 4}),
        ({"nodes": 4}, "HT-job-more-nodes-than-allowed", {"most": 3}),
        ({"nodes": 1}, "HT-job-fewer-nodes-than-allowed", {"least": 2}),
        ({"time": "99:00:00"}, "HT-job-longer-than-allowed", {"longest": "01:00:00"}),
        # Slurm counts whole minutes, and 0 is no limit.
        ({"time": "1:00:01"}, "HT-job-longer-than-allowed", {}),
        ({"time": "0"}, "HT-job-longer-than-allowed", {}),
        ({"time": "2-0"}, "HT-job-longer-than-allowed", {}),
        ({"gpus_per_node": 5}, "HT-job-larger-than-a-node", {"most": 4}),
    ],
)
def test_what_is_beyond(asked: dict[str, object], code: str, limit: dict[str, object]) -> None:
    values = {key.removesuffix("_per_node"): value for key, value in asked.items()}
    with refused(code, partition="batch", **values, **limit):
        ask(**asked)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"cpus_per_task": 13, "tasks_per_node": 8}, None),
        ({"cpus_per_task": 14, "tasks_per_node": 8}, "HT-job-larger-than-a-node"),
        ({"tasks_per_node": 105}, "HT-job-larger-than-a-node"),
        ({"sbatch": {"mem": "100G"}}, None),
        ({"sbatch": {"mem": "0"}}, None),
        ({"sbatch": {"mem": "102401"}}, "HT-job-larger-than-a-node"),
        ({"sbatch": {"mem": "0.1T"}}, None),
        ({"sbatch": {"mem": "1TB"}}, "HT-job-larger-than-a-node"),
        ({"sbatch": {"mem-per-cpu": "50g"}, "cpus_per_task": 3}, "HT-job-larger-than-a-node"),
        ({"sbatch": {"mem-per-gpu": "50G"}, "gpus_per_node": 2}, None),
    ],
)
def test_cpus_and_memory_of_a_node(asked: dict[str, object], code: str | None) -> None:
    limits = Limits(partition="batch", cpus=104, memory=102400)
    if code is None:
        assert ask(limits, **asked) == ()
    else:
        with refused(code, partition="batch"):
            ask(limits, **asked)


def test_without_limits() -> None:
    free = Limits(partition="free")
    assert ask(free, nodes=900, time="0", gpus_per_node=99) == ()
    # With --time-min Slurm takes what fits.
    assert ask(time="99:00:00", sbatch={"time-min": "10"}) == ()


def test_of_several_partitions_one_is_enough() -> None:
    day = Limits(partition="long", total=8, time="1-00:00:00")
    assert ask(HOUR, day, nodes=8, time="20:00:00") == ()
    with refused("HT-job-too-many-nodes", partition="long", total=8):
        ask(HOUR, day, nodes=9, time="20:00:00")


def test_a_partition_whose_limit_may_be_lifted_is_enough(programs: Path) -> None:
    install_sacctmgr(programs, "normal|\\nlong|PartitionTimeLimit")
    small, large = Limits(partition="small", total=4), Limits(partition="large", total=64, time="1:00:00")
    for partitions in ((small, large), (large, small)):
        (warning,) = ask(*partitions, nodes=9, time="2:00:00", qos="long")
        assert "PartitionTimeLimit" in warning
        with pytest.raises(HpctrainError):
            ask(*partitions, nodes=9, time="2:00:00", qos="normal")


@pytest.mark.parametrize(
    ("known", "asked", "lifted"),
    [
        ("normal|\\nlong|DenyOnLimit,PartitionTimeLimit", {"qos": "long"}, True),
        ("normal|\\nlong|PartitionTimeLimit", {"qos": "normal"}, False),
        # Which one is the default is not known.
        ("normal|PartitionTimeLimit", {}, True),
        ("normal|PartitionMaxNodes", {}, False),
        ("normal|PartitionTimeLimit", {"qos": "long"}, True),
    ],
)
def test_a_qos_may_lift_a_limit(programs: Path, known: str, asked: dict[str, str], lifted: bool) -> None:
    install_sacctmgr(programs, known)
    if lifted:
        (warning,) = ask(time="99:00:00", **asked)
        assert "99:00:00" in warning and "01:00:00" in warning
    else:
        with refused("HT-job-longer-than-allowed", time="99:00:00"):
            ask(time="99:00:00", **asked)
    # Nothing makes nodes.
    with refused("HT-job-too-many-nodes", total=4):
        ask(nodes=9, **asked)


def test_what_slurm_prints_of_a_partition() -> None:
    keys = {
        "PartitionName": "gpu",
        "TotalNodes": "32",
        "MinNodes": "0",
        "MaxNodes": "UNLIMITED",
        "MaxTime": "UNLIMITED",
    }
    assert read_limits(keys) == Limits(partition="gpu", total=32)
    keys |= {"MinNodes": "1", "MaxNodes": "16", "MaxTime": "2-00:00:00"}
    assert read_limits(keys | {"MaxMemPerNode": "64000"}, cpus=8).memory == 64000
    assert read_limits(keys) == Limits(partition="gpu", total=32, least=1, most=16, time="2-00:00:00")
    assert check_limits(requested(Cluster(profile=PLAIN), "x", {"nodes": 16, "time": "2-0"}), [read_limits(keys)]) == []
