"""PBS as a scheduler: OpenPBS and PBS Professional. Sources: qsub(1B), qstat(1B), pbs_job_attributes(7B)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.jobs import JobState, slurm_seconds
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.qsub.qsub_scheduler import QsubScheduler, job_name, user_name

_STATES = {"R": "RUNNING", "B": "RUNNING", "E": "COMPLETING", "S": "SUSPENDED", "U": "SUSPENDED"}
# Exit_status of a job: what the scheduler ended for its time, and what a signal ended, which is added to this.
_WALLTIME, _SIGNALS = -29, 256


class Pbs(QsubScheduler):
    """``qsub``, ``qselect``, ``qstat`` and ``qdel``. A job that has to go on submits its script again."""

    name = "PBS"
    prefix = "#PBS"
    number = "${PBS_JOBID%%.*}"
    again = "{qsub}"

    def directives(self, profile: ClusterProfile, request: JobRequest, directory: Path) -> Sequence[str]:
        """See :meth:`QsubScheduler.directives`."""
        chunk = [f"select={request.nodes}", f"mpiprocs={request.tasks_per_node}"]
        if request.cpus_per_task:
            chunk.append(f"ncpus={request.cpus_per_task * request.tasks_per_node}")
        chunk += [f"ngpus={request.gpus_per_node}"] if request.gpus_per_node else []
        chunk += [f"mem={_memory(request.memory)}"] if request.memory and request.memory != "0" else []
        lines = [
            f"-N {job_name(request.name)}",
            f"-l {':'.join(chunk)}",
            f"-l place=scatter{':excl' if request.exclusive else ''}",
            f"-o {directory / 'logs'}/",
            "-j oe",
            "-r y",
        ]
        if request.time and (seconds := slurm_seconds(request.time)):
            lines.append(f"-l walltime={seconds}")
        lines += [f"-q {request.partition}"] if request.partition else []
        lines += [f"-A {request.account}"] if request.account else []
        return lines

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        """See :meth:`Scheduler.list`. Ended jobs are those that the server still remembers (job_history_enable)."""
        # Other schedulers have programs of the same names; PBS has its configuration here, or where a variable says.
        if "PBS_CONF_FILE" not in os.environ and not Path("/etc/pbs.conf").exists():
            raise HpctrainError("HT-program-not-found", "{program} of PBS needs /etc/pbs.conf", program="qstat")
        if jobs is None:
            selected = run_program("qselect", "-u", user_name(user), seconds=seconds)
            _require(selected.returncode == 0, selected.stderr)
            jobs = selected.stdout.split()
        if not jobs:
            return ()
        # It fails for a job that it does not know, and prints the others. Its JSON is not always valid (openpbs#2541).
        done = run_program("qstat", "-x", "-f", *sorted(jobs), seconds=seconds)
        unknown = re.search(r"(?i)unknown job|has finished", done.stderr)
        _require(done.returncode == 0 or bool(done.stdout or unknown), done.stderr)
        return read_qstat(done.stdout)


def _require(answered: bool, said: str) -> None:
    if not answered:
        raise HpctrainError("HT-program-failed", "PBS does not answer: {reason}", exit_code=1, reason=said.strip())


def _memory(text: str) -> str:
    """Memory as PBS writes it, from Slurm's notation, in which a number alone counts MB."""
    return f"{text.lower()}{'mb' if text[-1].isdecimal() else 'b'}"


def read_qstat(text: str) -> list[JobState]:
    """The jobs in what ``qstat -f`` prints.

    Raises:
        HpctrainError: it is not such a text.
    """
    try:
        # A long value goes on in lines that begin with a tab. An array, 12[].pbs01, is no job of hpctrain.
        jobs = text.replace("\n\t", "").split("Job Id: ")[1:]
        return [_state(job) for job in jobs if "[" not in job.partition(".")[0]]
    except (ValueError, KeyError) as error:
        raise HpctrainError(
            "HT-program-failed", "qstat did not print a list of jobs: {reason}", exit_code=1, reason=error
        ) from error


def _state(text: str) -> JobState:
    number, job = str(int(text.partition(".")[0])), dict(re.findall(r"^    (\S+) = (.*)$", text, re.MULTILINE))
    letter = job["job_state"]
    ended, status = letter in "FX", int(job.get("Exit_status", 0))
    signal = status - _SIGNALS if status > _SIGNALS else 0
    state = _STATES.get(letter, "PENDING")
    if ended:
        # A job that never ran was deleted.
        cancelled = signal or "Exit_status" not in job
        state = "TIMEOUT" if status == _WALLTIME else "CANCELLED" if cancelled else "FAILED" if status else "COMPLETED"
    hosts = dict.fromkeys(re.findall(r"(?:^|\+)\(?([^/+]+)/", job.get("exec_host", "")))
    # The script is the last word, whose path has no blanks.
    script = job.get("Submit_arguments", "").rpartition(" ")[2]
    return JobState(
        id=number,
        state=state,
        reason=job.get("comment", "") if state == "PENDING" else "",
        seconds=slurm_seconds(job.get("resources_used.walltime", "")) or 0,
        limit_seconds=slurm_seconds(job.get("Resource_List.walltime", "")),
        nodes=",".join(hosts),
        exit_code=status if ended and 0 <= status < _SIGNALS else int(ended and status != 0 and not signal),
        signal=signal,
        command=script,
        directory=Path(script).parent,
    )
