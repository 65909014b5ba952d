"""Submits jobs to Slurm: ``sbatch``, once for each job of a chain."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.utf8 import encodable
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.scheduler import Order
from hpctrain.control.schedulers.slurm.queue import jobs_of_user
from hpctrain.control.schedulers.submission import made_run, record, run_path

if TYPE_CHECKING:
    from hpctrain.control.packing.pack import Pack

# Without a controller sbatch tries about this long before it fails.
_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """Everything that a submission consists of.

    Attributes:
        plans: of each task of an array by its number; of any other run, under None.
        render: the absolute path of a run directory to the text of the job script.
        files: further ones for the run directory, by name.
        notices: texts for the user, before submission.
        pack: what the nodes get of this environment; its archive must be there before the job begins.
    """

    plans: Mapping[int | None, Plan]
    render: Callable[[Path], str]
    files: Mapping[str, str]
    notices: tuple[str, ...]
    pack: Pack | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the run, or of the first task of an array."""
        return next(iter(self.plans.values()))

    def script(self, directory: Path) -> str:
        """The text of the job script for a run directory.

        Raises:
            HpctrainError: Slurm could not write a log there, or the template has a fault.
        """
        require_log_path(directory)
        return self.render(directory)


def submit_job(order: Order, job: PreparedJob) -> tuple[RunDirectory, tuple[str, ...]]:
    """Make the run directory and submit; returns the directory and the jobs' numbers, first to last.

    Raises:
        HpctrainError: the directory holds a run or cannot be written, or sbatch refuses; nothing is left behind.
    """
    # Rendered first, so that a fault of the template is reported before anything is written.
    job.script(run_path(order, job.plans))
    jobs: list[str] = []
    with made_run(order, job.plans, job.files) as directory:
        try:
            write_whole(directory.script, job.script(directory.path).encode(), private=True)
            # Executable, so that the user can run it within an allocation.
            directory.script.chmod(0o700)
            for _ in range(order.request.chain):
                jobs.append(_sbatch(directory, _dependency(order.request, jobs)))
                # A job that completes the run cancels the later jobs listed here.
                write_whole(directory.path / "chain", "".join(f"{number}\n" for number in jobs).encode(), private=True)
            record(directory, order, jobs)
        except BaseException:
            _cancel(jobs, directory.script)
            raise
    return directory, tuple(jobs)


def check(script: str) -> str:
    """Let Slurm check a script without submitting it; returns what it says, empty where there
    is no Slurm.

    Raises:
        HpctrainError: Slurm refuses it.
    """
    if shutil.which("sbatch") is None:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        done = run_program("sbatch", "--test-only", "--", file.name, seconds=_SECONDS)
    if done.returncode != 0:
        # The script is not at fault if the controller does not answer.
        if run_program("scontrol", "ping", seconds=_SECONDS).returncode != 0:
            return "Slurm does not answer, so the script is not checked"
        raise _refusal(done.stderr)
    return done.stderr.strip().removeprefix("sbatch: ")


def require_log_path(directory: Path) -> None:
    """Refuse a directory where Slurm (22.05) could not write a job's log, as it interprets % and backslashes.

    Raises:
        HpctrainError: its path has one of them, or is not UTF-8, as job scripts are.
    """
    if encodable(str(directory)) != str(directory):
        raise HpctrainError(
            "HT-run-directory-unfit",
            "{directory!r} is not UTF-8, as a job script is",
            "choose another one with --run-dir",
            directory=str(directory),
        )
    if found := [character for character in "%\\" if character in str(directory)]:
        raise HpctrainError(
            "HT-run-directory-unfit",
            "{directory}: Slurm writes no log to a path with {characters}",
            "choose another one with --run-dir",
            directory=directory,
            characters=" and ".join(found),
        )


def _dependency(request: JobRequest, previous: Sequence[str]) -> Sequence[str]:
    if previous:
        return (f"--dependency=afternotok:{previous[-1]}", "--kill-on-invalid-dep=yes")
    return (f"--dependency={request.dependency}",) if request.dependency is not None else ()


def _sbatch(directory: RunDirectory, options: Sequence[str]) -> str:
    done = run_program(
        "sbatch", "--parsable", *options, f"--chdir={directory.path}", str(directory.script), seconds=_SECONDS
    )
    # The cluster's name may follow the number.
    number = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not number.isdigit():
        raise _refusal(done.stderr or done.stdout)
    return number


def _refusal(message: str) -> HpctrainError:
    words = "\n  ".join(line.removeprefix("sbatch: ") for line in message.strip().splitlines())
    return HpctrainError(
        "HT-job-refused",
        "sbatch refuses the job: {reason}",
        "hpctrain submit … --dry-run shows its script; sinfo, what there is",
        reason=words,
    )


def _cancel(jobs: Sequence[str], script: Path) -> None:
    """Cancel the jobs, and those of the same script: Slurm may have accepted one without our having heard of it."""
    numbers = set(jobs)
    with contextlib.suppress(HpctrainError):
        found = jobs_of_user(os.getuid(), seconds=_SECONDS)
        numbers |= {job.job for job in found if job.live and Path(job.command) == script}
    if numbers:
        run_program("scancel", *sorted(numbers), seconds=_SECONDS)
