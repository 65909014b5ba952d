"""The batch process of a job: it prepares the nodes, runs the training, and sees to it that the run goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.stopping import JOB_SIGNAL, RESUMABLE, is_cancelled
from hpctrain.control.schedulers.job_request import SETTINGS, JobSettings
from hpctrain.control.schedulers.slurm.job_nodes import (
    check_nodes,
    look_at_image,
    nodes_to_exclude,
    record_failed,
    use_only,
    used_of_asked,
)

# A scheduler that is restarted answers late; a second job beside a requeued one would be worse than to wait.
_PATIENCE_SECONDS = 3600.0
# As a check exits that found a fault.
_CHECK_FAILED = 3


def run_batch(directory: Path, told: str | None, say: Callable[[str], None]) -> int:
    """Do all that the job whose script is in ``directory`` has to; returns its exit status.

    Args:
        told: the signal that came before this process began, without ``SIG``.

    Raises:
        HpctrainError: the nodes cannot be prepared.
    """
    settings = read_model(directory / SETTINGS, JobSettings)
    batch = _Batch(directory, settings, told, say)
    for number in (JOB_SIGNAL, signal.SIGTERM):
        signal.signal(number, batch.hear)
    status = batch.train()
    if status == RESUMABLE:
        batch.go_on()
    elif status == 0 and (used := used_of_asked(RunDirectory(directory), settings.request.end_seconds)):
        say(f"hpctrain: {used}")
    return status


class _Batch:
    def __init__(self, directory: Path, settings: JobSettings, told: str | None, say: Callable[[str], None]) -> None:
        self._settings, self._request, self._asked, self._say = settings, settings.request, told, say
        self._run = RunDirectory(directory)
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._again = [f"--chdir={directory}", str(self._run.script)]
        self._child: subprocess.Popen[bytes] | None = None
        self._begun = self._ended = False
        self._failed: dict[str, str] = {}

    def hear(self, number: int, _frame: Any) -> None:
        # What comes after the training is not why it ended.
        if not self._ended:
            self._asked = signal.Signals(number).name.removeprefix("SIG")
            self._pass_on()

    def _stops(self) -> bool:
        return bool(self._asked)

    def _pass_on(self) -> None:
        """Tell hpctrain, which then writes a checkpoint and leaves. Of TERM a second one would end all at once, and on
        some clusters it gets one from Slurm.
        """
        if self._stops() and self._child:
            self._child.send_signal(JOB_SIGNAL)

    def train(self) -> int:
        """Run or resume the training on nodes that are prepared for it; returns its exit status."""
        settings = self._settings
        if self._request.cpus_per_task:
            # Since Slurm 22.05 srun does not take it from the job.
            os.environ["SRUN_CPUS_PER_TASK"] = str(self._request.cpus_per_task)
        try:
            if settings.check and not self._stops() and not self._check():
                return RESUMABLE if self._replaceable() else _CHECK_FAILED
            if settings.container:
                look_at_image(settings.container)
            return self._verify_and_run()
        finally:
            self._ended = True

    def _check(self) -> bool:
        """Check the nodes, and leave out those that fail; returns whether enough are left."""
        checked = check_nodes(self._run, self._say)
        self._failed = {node: fault for node, fault in checked.items() if fault}
        for node, fault in self._failed.items():
            self._say(f"hpctrain: {node} fails a check: {fault}")
        record_failed(self._run, self._failed)
        fit = [node for node in checked if node not in self._failed]
        use_only(fit[: self._request.nodes])
        return len(fit) >= self._request.nodes

    def _replaceable(self) -> bool:
        """Whether the next job can have other nodes than those that failed a check."""
        # No signal kept the training from beginning.
        self._begun = True
        return {*self._failed} <= {*(self._excluded or ())}

    @cached_property
    def _excluded(self) -> tuple[str, ...] | None:
        """The nodes that the next job leaves out; None where no node has failed."""
        needed = int(os.environ["SLURM_JOB_NUM_NODES"])
        return nodes_to_exclude(self._run, self._request, needed, self._say)

    @property
    def _exclusion(self) -> str:
        """The same, and those that the user left out, as Slurm takes them."""
        return ",".join(filter(None, [self._request.sbatch.get("exclude"), *(self._excluded or ())]))

    def _verify_and_run(self) -> int:
        run, verified = self._run, self._run.path / "verify"
        if self._settings.verify and not self._stops() and not (verified / "equal").exists():
            shutil.rmtree(verified, ignore_errors=True)
            status = self._follow("verify", "--plan", str(run.plan), "--run-dir", str(verified))
            if status == 0:
                (verified / "equal").touch()
            elif not self._stops():
                return _of_shell(status)
        if self._stops():
            return RESUMABLE
        # It takes the job's hosts, orders them, starts the ranks, and goes on from the newest checkpoint.
        status = self._follow("run", "--resume", "--run-dir", str(run.path))
        # One that a signal ended was told before it could listen: nothing had begun.
        self._begun = not (self._stops() and status in (-signal.SIGTERM, -JOB_SIGNAL))
        if not self._begun:
            return RESUMABLE
        return _of_shell(status)

    def _follow(self, *arguments: str) -> int:
        with subprocess.Popen(["hpctrain", *arguments]) as self._child:
            # A signal that came before there was a process.
            self._pass_on()
            status = self._child.wait()
        self._child = None
        return status

    def go_on(self) -> None:
        """See to it that another job, or this one again, goes on with a run that is not finished."""
        if self._asked == "TERM" or is_cancelled(self._run.stop):
            # A cancelled job must not come back, and a preempted one does so by itself.
            self._how(f"job {self._job} was told to end before it was finished. To go on")
        elif not self._begun:
            # It might be so each time, for ever.
            remedy = "ask for more time (--time) or a smaller signal_seconds"
            self._how(f"{self._asked} came before the training began: {remedy}. To go on")
        elif not (self._request.requeue and self._requeued()) and not self._followed():
            programs = "neither scontrol requeue nor sbatch works" if self._request.requeue else "sbatch does not work"
            self._how(f"{programs} here. To go on")

    def _how(self, why: str) -> None:
        self._say(f"hpctrain: {why}:")
        self._say(f"  {shlex.join(['sbatch', *self._again])}")

    def _requeued(self) -> bool:
        excluded = self._excluded
        self._say(f"hpctrain: job {self._job} is not finished and goes back to the queue")
        # Slurm may end all that the job runs before it answers. A requeue that went well must not look failed then:
        # another job would go on beside this one.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if self._slurm("scontrol", "requeue", self._job) is None:
                return False
            # Slurm takes a list only for a job that waits. An empty one forgets those of more than a day ago.
            if excluded is not None:
                self._slurm("scontrol", "update", f"JobId={self._job}", f"ExcNodeList={self._exclusion}")
            return True
        finally:
            signal.signal(signal.SIGTERM, before)

    def _followed(self) -> bool:
        """Whether another job goes on when this one has ended, where jobs may not go back."""
        options = [f"--dependency=afterany:{self._job}", *([f"--exclude={self._exclusion}"] if self._excluded else [])]
        number = self._slurm("sbatch", "--parsable", *options, *self._again)
        if number is not None:
            self._say(f"hpctrain: job {self._job} is not finished, so job {number.strip().partition(';')[0]} goes on")
        return number is not None

    def _slurm(self, *command: str) -> str | None:
        """What the command prints; None if it fails, which is then said."""
        try:
            done = run_program(*command, seconds=_PATIENCE_SECONDS)
        except HpctrainError as error:
            self._say(error.message)
            return None
        if done.returncode:
            self._say(f"{command[0]} fails: {done.stderr.strip()}")
        return None if done.returncode else done.stdout


def _of_shell(status: int) -> int:
    """A process's exit status as a shell gives it."""
    return 128 - status if status < 0 else status
