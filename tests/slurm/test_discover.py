"""``discover`` on the local Slurm: what it says is what the cluster was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.schedulers.order import find_cluster, requested
from hpctrain.control.schedulers.profiles import load_profile
from hpctrain.control.schedulers.slurm.discover import discover, profile_yaml
from support.refusals import refused
from support.slurm.local_slurm import LocalSlurm


@pytest.fixture(autouse=True)
def at_the_cluster(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)


def test_the_default_partition(slurm: LocalSlurm, tmp_path: Path) -> None:
    discovered = discover(None)
    settings, profile = slurm.settings, discovered.profile
    assert (profile.name, profile.partition) == ("local", "batch")
    assert (profile.node.gpus, profile.node.cores) == (settings.gpus, settings.cpus)
    assert profile.time == f"{settings.max_minutes // 60:02}:{settings.max_minutes % 60:02}:00"
    assert profile.requeue
    said = "\n".join(discovered.findings)
    kind = f"{settings.gpus} GPUs, {settings.cpus} cores, 4000 MB"
    assert f"nodes: {len(settings.nodes)} with {kind} (sinfo)" in said
    assert "topology/tree: " in said
    assert "pmi2, pmix" in said
    path = tmp_path / "auto.yaml"
    path.write_text(profile_yaml(profile))
    assert load_profile(str(path)) == profile
    # Slurm takes it.
    asked = (f"--partition={profile.partition}", f"--time={profile.time}", f"--gpus-per-node={profile.node.gpus}")
    slurm.run("sbatch", "--test-only", *asked, "--nodes=4", "--wrap=true")


def test_another_partition_and_one_that_is_not_there() -> None:
    profile = discover("short").profile
    assert (profile.partition, profile.time) == ("short", "00:05:00")
    with refused("HT-slurm-partition-not-usable", partition="shor") as caught:
        discover("shor")
    assert caught.value.hint.endswith("batch, short")


@pytest.mark.parametrize("cluster", ["auto", "generic"])
def test_what_no_job_gets_is_refused(slurm: LocalSlurm, cluster: str) -> None:
    """Slurm itself takes such jobs and keeps them in its queue, but for those with too many GPUs."""
    found = find_cluster(cluster, None)
    with refused("HT-job-larger-than-a-node", gpus=9, partition="batch", most=slurm.settings.gpus):
        requested(found, "x", {"gpus_per_node": 9, "cpus_per_task": 1})
    with refused("HT-job-too-many-nodes", nodes=9, partition="batch", total=4):
        requested(found, "x", {"nodes": 9})
    with refused("HT-job-longer-than-allowed", time="99:00:00", partition="batch", longest="01:00:00"):
        requested(found, "x", {"time": "99:00:00"})
    assert requested(found, "x", {"nodes": 4, "time": "1:00:00"}).doubts == ()
    if cluster == "generic":
        return
    for beyond in ("--nodes=9", "--time=99:00:00"):
        job = slurm.run("sbatch", "--parsable", "--partition=batch", beyond, "--wrap=true").strip()
        try:
            said = slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T %r").strip()
            assert said in ("PENDING PartitionConfig", "PENDING PartitionTimeLimit", "PENDING PartitionNodeLimit")
        finally:
            slurm.run("scancel", job)


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
