"""The job scripts that a person can read in tests/golden/jobs, and how each is made."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.container import Container
from hpctrain.control.schedulers.profile import ClusterProfile, NodeProfile
from hpctrain.control.schedulers.request import job_request
from hpctrain.control.schedulers.slurm.script import NodeSetup, render, variables
from hpctrain.control.schedulers.staging import PackedEnvironment, StagedPaths, Staging

RUN_DIRECTORY = Path("/home/me/it's a run")
PLAIN = ClusterProfile(name="plain", source="the tests")
GPUS = ClusterProfile(
    name="gpus",
    source="the tests",
    node=NodeProfile(gpus=4, gpu_type="h100", cores=64, memory="480G", exclusive=True),
    partition="gpu",
    account="project-1",
    time="24:00:00",
    modules=("gcc/13.2", "openmpi/5.0.3"),
    setup=("ulimit -l unlimited",),
    environment={"NCCL_DEBUG": "WARN", "MOTTO": "it's $HOME"},
    node_storage="$TMPDIR",
    sbatch={"mail-type": "END,FAIL", "comment": "a # and a \\"},
)
_STAGING = Staging(
    folder="$TMPDIR/hpctrain-$SLURM_JOB_ID",
    copies=(
        StagedPaths(source="/data/imagenet.tar", name="imagenet", kind="tar"),
        StagedPaths(source="/data/it's.zip", name="it's", kind="zip"),
        StagedPaths(source="/data/labels.json", name="labels.json", kind="copy"),
    ),
    environment=StagedPaths(source="/home/me/venv", name="environment", kind="copy"),
)
_PACK = PackedEnvironment(
    archive="/home/me/it's a cache/0123abcd.tar.gz", digest="0123abcd", folder="$TMPDIR/hpctrain-environments-$UID"
)


def script(profile: ClusterProfile, name: str = "digits", *, more: dict[str, Any] | None = None, **asked: Any) -> str:
    """A script on a cluster; ``more`` goes to :class:`NodeSetup` and :func:`variables`."""
    request = job_request(profile, name, asked)
    settings: dict[str, Any] = {"run_directory": RUN_DIRECTORY, "folder": Path("/home/me"), **(more or {})}
    setup = {each.name: settings.pop(each.name) for each in fields(NodeSetup) if each.name in settings}
    return render(variables(request, profile, NodeSetup(**setup), **settings))


CASES = {
    "one-node": script(GPUS, more={"virtual_environment": Path("/home/me/my venv")}),
    "four-nodes": script(GPUS, nodes=4, tasks_per_node=8, cpus_per_task=8, time="2-00"),
    "cpu-only": script(PLAIN, nodes=2, time="30", more={"virtual_environment": Path("/home/me/venv")}),
    "apptainer": script(GPUS, more={"container": Container(runtime="apptainer", image="/images/it's.sif")}),
    "apptainer-address": script(GPUS, more={"container": Container(runtime="apptainer", image="docker://a/b")}),
    "pyxis": script(GPUS, nodes=2, more={"container": Container(runtime="pyxis", image="nvcr.io#nvidia/b")}),
    "staging": script(GPUS, nodes=2, more={"staging": _STAGING}),
    "pack": script(GPUS, nodes=2, more={"pack": _PACK}),
    "verify": script(PLAIN, more={"verify": True}),
    "array": script(PLAIN, array="0-9%2", time="10"),
    "chain": script(PLAIN, chain=3, time="10"),
    "fault-tolerant": script(PLAIN, nodes=4, more={"no_kill": True}),
    "no-requeue": script(PLAIN.model_copy(update={"requeue": False})),
}
