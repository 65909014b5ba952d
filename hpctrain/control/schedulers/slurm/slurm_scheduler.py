"""Slurm as a scheduler."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import encodable
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.job_request import SETTINGS, JobRequest, JobSettings
from hpctrain.control.schedulers.job_script import ScriptScheduler, render
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster, Order
from hpctrain.control.schedulers.slurm.queue import job_states

# sacct marks an unknown number by one of the two largest values of 64 bits.
_UNKNOWN = 2**64 - 2
# What a directive needs no quotes for.
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


class Slurm(ScriptScheduler):
    """``sbatch``, ``squeue``, ``sacct`` and ``scancel``."""

    ends = "scancel"
    terse = ("--parsable",)

    def discover(self, partition: str | None) -> Cluster:
        from hpctrain.control.schedulers.slurm.discover import discover

        return discover(partition)

    def script(self, order: Order, plan: Plan, directory: Path) -> str:
        start = order.training.start
        if start.container and start.container.runtime == "pyxis" and start.launcher == "mpirun":
            raise HpctrainError(
                "HT-launcher-not-usable-here",
                "pyxis is a plugin of srun: mpirun cannot start its containers",
                "--launcher srun-pmix",
            )
        require_log_path(directory)
        return job_script(
            order.request,
            order.cluster.profile,
            run_dir=directory,
            folder=Path.cwd(),
            virtual_environment=_virtual_environment(),
            no_kill=plan.fault_tolerant,
        )

    def command(self, directory: RunDirectory) -> tuple[str, ...]:
        return ("sbatch", f"--chdir={directory.path}", str(directory.script))

    def files(self, order: Order) -> Mapping[str, str]:
        settings = JobSettings(
            request=order.request,
            verify=order.verify,
            check=order.check or order.request.spare > 0,
            container=order.training.start.container,
        )
        return {SETTINGS: f"{settings.model_dump_json(indent=2, exclude_defaults=True)}\n"}

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        return job_states(jobs, user=user, seconds=seconds)

    def joules(self, jobs: Sequence[str], *, seconds: float) -> int | None:
        """See :meth:`Scheduler.joules`. Steps are not counted, because they overlap.

        Where a cluster measures it, it is each whole node's, so that it is a job's own only if the job has its nodes
        alone. Source: https://slurm.schedmd.com/sacct.html (ConsumedEnergyRaw).
        """
        if not jobs:
            return None
        options = ("--allocations", "--noheader", "--parsable2", "--format=ConsumedEnergyRaw")
        printed = program_output("sacct", *options, f"--jobs={','.join(jobs)}", seconds=seconds)
        drawn = [int(line) for line in printed.splitlines() if line.isdecimal()]
        return sum(joules for joules in drawn if joules < _UNKNOWN) or None


def _virtual_environment() -> Path | None:
    """The virtual environment that this hpctrain is installed in; None without one."""
    here = Path(sys.prefix)
    return here if sys.prefix != sys.base_prefix and (here / "bin" / "activate").exists() else None


def require_log_path(directory: Path) -> None:
    """Refuse a directory where Slurm (22.05) could not write a job's log, as it interprets % and backslashes.

    Raises:
        HpctrainError: its path has one of them, or is not UTF-8, as job scripts are.
    """
    text = str(directory)
    if encodable(text) != text or "%" in text or "\\" in text:
        raise HpctrainError(
            "HT-run-directory-unfit",
            "{directory!r}: Slurm writes no log to a path with % or \\, or one that is not UTF-8",
            "choose another one with --run-dir",
            directory=text,
        )


def job_script(request: JobRequest, profile: ClusterProfile, **given: Any) -> str:
    """The text of the job script; its template says what is to be given."""
    settings = {"requeue": request.requeue, "signal_seconds": request.signal_seconds}
    return render("job.sh.j2", profile, directives=directives(request), **settings, **given)


def directive(option: str, value: str | int | None = None) -> str:
    """The line of one option.

    Within double quotes Slurm's parser (22.05) takes every character as it is, but for the backslash, which makes the
    next one plain. Outside of them a blank ends the value, even one after a backslash, and # begins a comment.

    Args:
        option: its long name, without the dashes.
        value: one line of text; None for an option without a value.
    """
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{option}={text}"


def directives(request: JobRequest) -> tuple[str, ...]:
    """The options of the job, one per line, without those about the script itself (log, signal, requeue).

    ``--dependency`` is not among them: it is for the first job, and the script is also that of those which follow.
    """
    gpus = _gpus(request)
    requested: dict[str, str | int | None] = {
        "job-name": request.name,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "nodes": request.nodes + request.spare,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        "gres": gpus,
        "mem": request.memory,
        "time": request.time,
    }
    lines = [directive(option, value) for option, value in requested.items() if value is not None]
    if request.exclusive:
        lines.append(directive("exclusive"))
    further = {option: value for option, value in request.sbatch.items() if not (gpus and option == "gres")}
    return (*lines, *(directive(option, value) for option, value in further.items()))


def _gpus(request: JobRequest) -> str | None:
    if not request.gpus_per_node:
        return None
    number = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
    # Slurm uses only the last --gres.
    others = request.sbatch.get("gres")
    return f"gpu:{number},{others}" if others else f"gpu:{number}"
