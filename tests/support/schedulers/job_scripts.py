"""The job scripts that a person can read in tests/golden/jobs, and how each is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.control.schedulers.job_request import SETTINGS, JobSettings, job_request
from hpctrain.control.schedulers.profile import ClusterProfile, NodeProfile
from hpctrain.control.schedulers.slurm.slurm_scheduler import job_script

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
    sbatch={"mail-type": "END,FAIL", "comment": "a # and a \\"},
)


def script(profile: ClusterProfile, name: str = "digits", *, more: dict[str, Any] | None = None, **asked: Any) -> str:
    """A script on a cluster; ``more`` goes to :func:`job_script`, and to the job's settings in its directory."""
    request = job_request(profile, name, asked)
    given: dict[str, Any] = {"run_dir": RUN_DIRECTORY, "folder": Path("/home/me"), "virtual_environment": None}
    given |= {"no_kill": False, **(more or {})}
    settings = {key: given.pop(key) for key in ("container", "check", "verify") if key in given}
    if (directory := given["run_dir"]).exists():
        made = JobSettings(request=request, **settings)
        (directory / SETTINGS).write_text(made.model_dump_json())
    return job_script(request, profile, **given)


CASES = {
    "one-node": script(GPUS, more={"virtual_environment": Path("/home/me/my venv")}),
    "four-nodes": script(GPUS, nodes=4, tasks_per_node=8, cpus_per_task=8, time="2-00"),
    "cpu-only": script(PLAIN, nodes=2, time="30", more={"virtual_environment": Path("/home/me/venv")}),
    "fault-tolerant": script(PLAIN, nodes=4, more={"no_kill": True}),
    "no-requeue": script(PLAIN.model_copy(update={"requeue": False})),
}
