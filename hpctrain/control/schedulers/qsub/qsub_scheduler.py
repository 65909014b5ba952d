"""What PBS and Grid Engine have in common: a job script with directives, ``qsub`` and ``qdel``."""

from __future__ import annotations

import getpass
import pwd
import re
import shlex
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.job_script import ScriptScheduler, render
from hpctrain.control.schedulers.jobs import slurm_seconds
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Order

# Options of `hpctrain submit` that are Slurm's, or that only its jobs act on.
NOT_HERE = frozenset(
    (
        *("--qos", "--constraint", "--dependency", "--sbatch", "--check", "--spare", "--verify"),
        *("--container-runtime", "--container"),
    )
)

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


class QsubScheduler(ScriptScheduler):
    """Jobs of ``qsub``. A job whose time ends writes a checkpoint, and sees to it that the run goes on."""

    ends = "qdel"
    name: ClassVar[str]
    # Of a directive's line.
    prefix: ClassVar[str]
    # Bash that prints the job's number within the job.
    number: ClassVar[str]
    # Bash by which a job that is not finished lets the run go on.
    again: ClassVar[str]
    # Options that it cannot honour.
    refused: ClassVar[frozenset[str]] = NOT_HERE

    @abstractmethod
    def directives(self, profile: ClusterProfile, request: JobRequest, directory: Path) -> Sequence[str]:
        """The options of the job, a line each, without :attr:`prefix` and the profile's own.

        Raises:
            HpctrainError: the profile lacks what this scheduler needs.
        """

    def command(self, directory: RunDirectory) -> tuple[str, ...]:
        return ("qsub", str(directory.script))

    def script(self, order: Order, plan: Plan, directory: Path) -> str:
        for option in sorted(self.refused & {*order.options}):
            raise HpctrainError(
                "HT-option-not-usable-here",
                "{option} has no meaning for {scheduler}",
                "leave it out; the profile's `qsub` has lines for whatever the site's qsub takes",
                option=option,
                scheduler=self.name,
            )
        if not _PLAIN.fullmatch(str(directory)):
            raise HpctrainError(
                "HT-run-directory-unfit",
                "{directory!r}: a directive of qsub takes a path of letters, digits and @%+=:,./_- alone",
                "choose another one with --run-dir",
                directory=str(directory),
            )
        profile, request = order.cluster.profile, order.request
        seconds = slurm_seconds(request.time) if request.time else None
        if seconds and seconds <= request.signal_seconds:
            raise HpctrainError(
                "HT-option-bad-value",
                "--time {time}: {seconds} s before its end the job writes a checkpoint, so no time is left to train",
                "ask for more, or for smaller signal_seconds in the profile",
                time=request.time,
                seconds=request.signal_seconds,
            )
        qsub = shlex.join(self.command(RunDirectory(directory)))
        numbers = {"nodes": request.nodes, "ranks": request.ranks, "gpus_per_node": request.gpus_per_node}
        lines = [*self.directives(profile, request, directory), *(_filled(line, numbers) for line in profile.qsub)]
        if plan.start.passed:
            lines.append(f"-v {','.join(plan.start.passed)}")
        return render(
            "qsub.sh.j2",
            profile,
            directives=[f"{self.prefix} {line}" for line in lines],
            run_dir=directory,
            folder=Path.cwd(),
            bin=Path(sys.executable).parent,
            number=self.number,
            seconds=seconds - request.signal_seconds if seconds else None,
            again=self.again.format(qsub=qsub),
            qsub=qsub,
        )


def job_name(name: str) -> str:
    """A name of a job that both schedulers take: without blanks and signs, beginning with a letter."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:64]
    return plain if plain[:1].isalpha() else f"run-{plain}"


def user_name(user: int) -> str:
    """The name of a user by number, which ``qstat -u`` wants."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return getpass.getuser()


def _filled(line: str, numbers: dict[str, int]) -> str:
    for name, number in numbers.items():
        line = line.replace(f"{{{name}}}", str(number))
    return line
