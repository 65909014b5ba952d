"""Grid Engine as a scheduler: Son of Grid Engine, Univa's and Altair's. Sources: qsub(1), qstat(1), accounting(5)."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.job_script import SECONDS
from hpctrain.control.schedulers.jobs import JobState, slurm_seconds
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.qsub.qsub_scheduler import NOT_HERE, QsubScheduler, job_name, user_name

# In the states of qstat, which are several letters, the first of these that occurs says it.
_STATES = {"d": "COMPLETING", "E": "PENDING", "s": "SUSPENDED", "S": "SUSPENDED", "T": "SUSPENDED", "w": "PENDING"}
# What sites count, or limit, of the memory of jobs; mem_free is known everywhere.
_MEMORY = ("h_vmem", "virtual_free", "h_rss", "mem_free")
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}


class GridEngine(QsubScheduler):
    """``qsub``, ``qstat``, ``qacct`` and ``qdel``. A job that has to go on gives itself back to the queue."""

    name = "Grid Engine"
    prefix = "#$"
    number = "$JOB_ID"
    # By this status a job asks to be run again.
    again = "exit 99"
    terse = ("-terse",)
    # Its slots are what the parallel environment of the site says.
    refused = NOT_HERE | {"--cpus-per-task"}

    def directives(self, profile: ClusterProfile, request: JobRequest, directory: Path) -> Sequence[str]:
        """See :meth:`QsubScheduler.directives`.

        Raises:
            HpctrainError: the profile has no parallel environment for several ranks, or the site no whole hosts.
        """
        lines = [
            f"-N {job_name(request.name)}",
            "-S /bin/bash",
            f"-o {directory / 'logs'}/job-$JOB_ID.log",
            "-j y",
            # The scheduler starts it again after a node failed, and tells it before it ends it.
            "-r y",
            "-notify",
        ]
        if request.time and (seconds := slurm_seconds(request.time)):
            lines.append(f"-l h_rt={seconds}")
        lines += [f"-q {request.partition}"] if request.partition else []
        lines += [f"-P {request.account}"] if request.account else []
        if request.ranks > 1 and not any(line.startswith("-pe ") for line in profile.qsub):
            raise HpctrainError(
                "HT-profile-lacks-key",
                "{ranks} ranks need a parallel environment, and the profile {profile} names none",
                "`qconf -spl` lists them; write into the profile: qsub: [-pe NAME {ranks}]",
                ranks=request.ranks,
                profile=profile.name,
            )
        return [*lines, *self._resources(request)] if request.exclusive or request.memory else lines

    def _resources(self, request: JobRequest) -> Sequence[str]:
        """The requests for whole hosts and for memory, by the site's own names for them. Source: complex(5)."""
        listed = _answer("qconf", "-sc", seconds=SECONDS)
        # Name, shortcut, type, relation, whether it can be requested and whether it is counted, default and urgency;
        # some versions have more behind these.
        rows = [row for line in listed.splitlines() if len(row := line.split()) >= 8]
        rows = [row for row in rows if row[4] in ("YES", "FORCED")]
        lines = []
        if request.exclusive:
            if (whole := next((row[0] for row in rows if row[3] == "EXCL"), None)) is None:
                raise HpctrainError(
                    "HT-option-not-usable-here",
                    "{option}: this {scheduler} has no resource by which a job asks for whole hosts",
                    "leave it out; an administrator can add one, whose relation is EXCL: qconf -mc",
                    option="node.exclusive",
                    scheduler=self.name,
                )
            lines.append(f"-l {whole}=true")
        # Unless the site counts what jobs have asked for, mem_free is what the host has at the job's start.
        counted = {row[0]: row[5] for row in rows if row[0] in _MEMORY and row[5] != "NO"}
        name = next((name for name in _MEMORY if name in counted), _MEMORY[-1])
        if request.memory and (kib := (_number(request.memory) * _KIB.get(request.memory[-1], _KIB["M"]))):
            # YES counts a request for each slot.
            slots = request.tasks_per_node if counted.get(name) == "YES" else 1
            lines.append(f"-l {name}={-(-kib // slots)}K")
        return lines

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        """See :meth:`Scheduler.list`. Ended jobs are those of the accounting, where its file can be read."""
        # Other schedulers have programs of the same names.
        if "SGE_ROOT" not in os.environ:
            raise HpctrainError("HT-program-not-found", "{program} of Grid Engine needs SGE_ROOT", program="qstat")
        listed = _answer("qstat", "-xml", "-u", user_name(user), seconds=seconds)
        live = [_live(text) for text in listed.split("<job_list")[1:]]
        live = [job for job in live if jobs is None or job.id in jobs]
        scripts = self._scripts([job.id for job in live], seconds)
        found = [job.model_copy(update=scripts.get(job.id, {})) for job in live]
        known = {job.id for job in found}
        return [*found, *filter(None, (_ended(job, seconds) for job in sorted({*(jobs or ())} - known)))]

    def _scripts(self, numbers: Sequence[str], seconds: float) -> dict[str, dict[str, object]]:
        """The script of each job, and its folder."""
        if not numbers:
            return {}
        detailed = run_program("qstat", "-xml", "-j", ",".join(numbers), seconds=seconds)
        scripts: dict[str, dict[str, object]] = {}
        for text in detailed.stdout.split("<JB_job_number>")[1:]:
            script = _element(text, "JB_script_file")
            scripts[text.partition("<")[0]] = {"command": script, "directory": Path(script).parent}
        return scripts


def _answer(program: str, *arguments: str, seconds: float) -> str:
    """The output of a program of Grid Engine's.

    Raises:
        HpctrainError: it fails, or does not answer.
    """
    done = run_program(program, *arguments, seconds=seconds)
    if done.returncode != 0:
        raise HpctrainError(
            "HT-program-failed",
            "{program} failed: {reason}",
            "ask whether Grid Engine's master is running, and whether SGE_ROOT and SGE_CELL are those of this cluster",
            exit_code=1,
            program=program,
            reason=done.stderr.strip(),
        )
    return done.stdout


def _live(text: str) -> JobState:
    letters, queue = _element(text, "state"), _element(text, "queue_name")
    state = next((state for letter, state in _STATES.items() if letter in letters), "RUNNING")
    begun = _element(text, "JAT_start_time")
    start = datetime.fromisoformat(begun).timestamp() if begun else None
    return JobState(
        id=_element(text, "JB_job_number"),
        state=state,
        reason="in error: qmod -cj JOB clears it" if "E" in letters else "",
        start=start,
        seconds=max(0, round(datetime.now().timestamp() - start)) if start else 0,
        nodes=queue.partition("@")[2],
        directory=Path(),
    )


def _ended(job: str, seconds: float) -> JobState | None:
    """A job of the accounting; None where it is not there yet, or nobody may read it."""
    try:
        done = run_program("qacct", "-j", job, seconds=seconds)
    except HpctrainError:
        return None
    # A job that went back to the queue has an entry for each of its runs, the last one last.
    values = dict(re.findall(r"^(\w+) +(.*?) *$", done.stdout.rpartition("====")[2], re.MULTILINE))
    if done.returncode != 0 or "exit_status" not in values:
        return None
    status = _number(values["exit_status"])
    failed = values.get("failed", "0").split(" ")[0]
    killed = failed == "100" or status > 128
    return JobState(
        id=job,
        state="CANCELLED" if killed else "FAILED" if status or failed != "0" else "COMPLETED",
        seconds=_number(values.get("ru_wallclock", "")),
        nodes=values.get("hostname", ""),
        exit_code=0 if killed else status,
        signal=status - 128 if status > 128 else 0,
        directory=Path(),
    )


def _number(text: str) -> int:
    """The whole number with which a value begins; 0 where there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _element(text: str, name: str) -> str:
    """The text of the first element of this name; empty where there is none."""
    match = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return html.unescape(match[1]) if match else ""
