"""Jobs that are scripts, rendered from the templates in ``slurm/`` and given to a program of the scheduler."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.profile import ClusterProfile, slurm_folder
from hpctrain.control.schedulers.scheduler import Order, Say, Scheduler, Submitted
from hpctrain.control.schedulers.submission import made_run, record, run_path

# Without a controller Slurm's programs try about this long before they fail.
SECONDS = 120.0


class ScriptScheduler(Scheduler):
    """A scheduler that takes a script, and prints the number of its job.

    Attributes:
        ends: the program that ends jobs.
        terse: options of the program that submits, with which it prints the job's number first.
    """

    ends: ClassVar[str]
    terse: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def script(self, order: Order, plan: Plan, directory: Path) -> str:
        """The text of the job script of a run in a directory.

        Raises:
            HpctrainError: the order cannot be met.
        """

    @abstractmethod
    def command(self, directory: RunDirectory) -> tuple[str, ...]:
        """The command that submits the script of a run."""

    def files(self, order: Order) -> Mapping[str, str]:
        """Further files for the run directory, by name."""
        return {}

    def describe(self, order: Order, say: Say) -> str:
        plan = self._plan(order, say)
        return self.script(order, plan, run_path(order, plan))

    def submit(self, order: Order, say: Say) -> Submitted:
        # Imported here because `hpctrain status` needs none of it.
        from hpctrain.common.extras import require_trackers

        plan = self._plan(order, say)
        require_trackers(plan.trackers, {**os.environ, **order.cluster.profile.environment})
        with made_run(order, plan, self.files(order)) as directory:
            write_whole(directory.script, self.script(order, plan, directory.path).encode(), private=True)
            # Executable, so that the user can run it within an allocation.
            directory.script.chmod(0o700)
            command = self.command(directory)
            waits = [] if order.request.dependency is None else [f"--dependency={order.request.dependency}"]
            number = _number(run_program(command[0], *self.terse, *waits, *command[1:], seconds=SECONDS))
            try:
                record(directory, order, [number], shlex.join(command))
            except BaseException:
                # What fails here must not hide why.
                with contextlib.suppress(HpctrainError):
                    self.cancel([number])
                raise
        advice = f"submitted as job {number}; see its state: hpctrain status {shell_word(directory.path)}"
        return Submitted(directory=directory.path, jobs=(number,), advice=advice)

    def _plan(self, order: Order, say: Say) -> Plan:
        """The plan, as far as it can be checked here. In a dry run a missing framework is only a warning."""
        from hpctrain.common.cluster.machine import as_if_installed, installed_frameworks
        from hpctrain.control.launchers.launcher_choice import require_choices, require_image

        container = order.training.start.container
        require_image(container)
        frameworks, missing = installed_frameworks(), tuple[str, ...]()
        if order.training.dry_run and container is None:
            frameworks, missing = as_if_installed(frameworks)
        plan = order.plan(frameworks)
        require_choices(plan)
        for line in (*order.cluster.findings, *(f"warning: {text}" for text in missing)):
            say(line)
        return plan

    def cancel(self, jobs: Sequence[str]) -> None:
        done = run_program(self.ends, *jobs, seconds=SECONDS)
        if done.returncode != 0:
            raise HpctrainError(
                "HT-program-failed",
                "{program} {jobs} failed: {reason}",
                exit_code=1,
                program=self.ends,
                jobs=" ".join(jobs),
                reason=done.stderr.strip() or done.stdout.strip(),
            )


def _number(done: subprocess.CompletedProcess[str]) -> str:
    """The number of a job, which the program that submitted it has printed."""
    # Slurm may print the cluster's name behind it, and PBS the server's.
    number = re.match(r"\d+", done.stdout.strip())
    if done.returncode != 0 or number is None:
        raise HpctrainError(
            "HT-job-refused",
            "{program} refuses the job: {reason}",
            "hpctrain submit … --dry-run shows its script",
            program=done.args[0],
            reason=done.stderr.strip() or done.stdout.strip(),
        )
    return number[0]


def render(template: str, profile: ClusterProfile, **values: Any) -> str:
    """The text of a job script.

    Args:
        template: the name of its file.
        profile: gives modules, setup lines and variables.
        values: the other names of the template.
    """
    # Imported here because only this needs it, and it takes long.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - it is bash, which the filter quotes for
        loader=FileSystemLoader(slurm_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(
        modules=profile.modules, setup=profile.setup, environment=profile.environment, **values
    )
