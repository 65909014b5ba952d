"""``discover`` on the local Slurm: what it says is what the cluster was made with."""

from __future__ import annotations

import pytest

from hpctrain.control.schedulers.slurm.discover import discover
from support.refusals import refused
from support.slurm.local_slurm import LocalSlurm
from support.slurm.slurm_conf import MAX_MINUTES


@pytest.fixture(autouse=True)
def at_the_cluster(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)


def test_the_default_partition(slurm: LocalSlurm) -> None:
    discovered = discover(None)
    settings, profile = slurm.settings, discovered.profile
    assert (profile.name, profile.partition) == ("local", "batch")
    assert (profile.node.gpus, profile.node.cores) == (settings.gpus, settings.cpus)
    assert profile.time == f"{MAX_MINUTES // 60:02}:00:00"
    assert profile.requeue
    said = "\n".join(discovered.findings)
    kind = f"{settings.gpus} GPUs, {settings.cpus} cores, 4000 MB"
    assert f"nodes: {len(settings.nodes)} with {kind}" in said
    # Slurm takes it.
    asked = (f"--partition={profile.partition}", f"--time={profile.time}", f"--gres=gpu:{profile.node.gpus}")
    slurm.run("sbatch", "--test-only", *asked, "--nodes=4", "--wrap=true")


def test_another_partition_and_one_that_is_not_there() -> None:
    profile = discover("short").profile
    assert (profile.partition, profile.time) == ("short", "00:05:00")
    with refused("HT-slurm-partition-not-usable", partition="shor") as caught:
        discover("shor")
    assert "short" in caught.value.hint


def test_nodes_that_are_drained(slurm: LocalSlurm) -> None:
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    try:
        assert [line for line in discover(None).findings if "1 more" in line]
        slurm.run("scontrol", "update", "NodeName=n[2-4]", "State=DRAIN", "Reason=test")
        with refused("HT-slurm-partition-not-usable", partition="batch", broken=4):
            discover(None)
    finally:
        slurm.run("scontrol", "update", "NodeName=n[1-4]", "State=RESUME")
        slurm.wait_idle()
