"""``hpctrain verify``."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import Arguments, HostsWithSlots, Oversubscribe, RecipeOrScript, with_groups
from hpctrain.cli.training_options import StartOptions, WorkOptions
from hpctrain.cli.work import read_work
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model, write_json
from hpctrain.common.run.plan import HostOptions, Plan, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.report.output import answer, answer_json, tell

if TYPE_CHECKING:
    from hpctrain.control.verify.differences import Verdict

_DIFFERENT = 3
_RANKS = 2


@with_groups
def verify(
    work: RecipeOrScript = None,
    arguments: Arguments = None,
    ranks: Annotated[int | None, typer.Option("-np", metavar="N", min=1, help="Number of ranks; by default 2.")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Steps of an optimizer to compare.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    oversubscribe: Oversubscribe = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the runs here; by default they are temporary, and kept if they differ."),
    ] = None,
    submitted: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Verify what a job's plan.json holds, on the job's nodes."),
    ] = None,
    *,
    training: WorkOptions,
    hosts: HostsWithSlots,
    start: StartOptions,
) -> None:
    """Prove that N ranks compute what one process computes: gradients and parameters, step by step.

    The work runs three times for a few steps. A script's own files go where it writes them; HPCTRAIN_VERIFY=1 is set,
    so that it may leave them out. Exit status: 0 equal, 3 different, 1 the work failed, 2 wrong use.
    """
    if (work is None) == (submitted is None):
        raise HpctrainError(
            "HT-argument-missing",
            "verify which recipe or script?",
            "name it, as in hpctrain verify digits -np 2; --plan names the plan of a job in its place",
        )
    if submitted:
        request = _of_plan(read_model(submitted, Plan, links=True), start)
    else:
        assert work is not None
        request = TrainingRequest(
            work=read_work(work, training, arguments or []),
            ranks=ranks or _RANKS,
            backend=training.backend,
            framework=training.framework,
            host_options=HostOptions(**hosts.given()),
            start=Start(**start.changes(), oversubscribe=oversubscribe or (ranks or _RANKS) > (os.cpu_count() or 1)),
        )
    from hpctrain.control.verify.runs import Options
    from hpctrain.control.verify.runs import verify as verify_work
    from hpctrain.report.summary import summarise

    folder = _folder(run_dir)
    options = Options(steps=steps, folder=folder, summarise=summarise)
    # mpirun would take the input that is meant for what comes after this command in a shell's loop.
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    verdict = verify_work(request, options, lambda text: tell(f"verify: {text} …"))
    _answer(verdict, as_json=as_json)
    if run_dir is None and verdict.equal:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        tell(f"report: hpctrain report {shell_word(verdict.run)}")
    if submitted and not verdict.equal:
        # What asks about the job finds it by this line of the log.
        raise HpctrainError(
            "HT-verify-different",
            "{ranks} ranks do not compute what one process computes",
            f"the job ends here; see {shell_word(verdict.run)}, or submit without --verify",
            exit_code=_DIFFERENT,
            ranks=verdict.ranks,
        )
    raise typer.Exit(0 if verdict.equal else _DIFFERENT)


def _answer(verdict: Verdict, *, as_json: bool) -> None:
    """Print the verdict, and keep it in the ranks' run."""
    from hpctrain.control.verify.differences import lines_of

    record = verdict.model_dump(mode="json")
    write_json(RunDirectory(verdict.run).verdict, record)
    if as_json:
        answer_json(record)
        return
    for line in lines_of(verdict):
        answer(line)


def _of_plan(plan: Plan, start: StartOptions) -> TrainingRequest:
    """What a job will run."""
    return TrainingRequest(
        work=plan.work,
        ranks=plan.ranks,
        backend=plan.asked_backend,
        framework=plan.framework if plan.recipe else None,
        host_options=plan.host_options,
        start=Start(**{**dict(plan.start), **start.changes()}),
    )


def _folder(run_dir: Path | None) -> Path:
    if run_dir is None:
        try:
            return Path(tempfile.mkdtemp(prefix="hpctrain-verify-"))
        except OSError as error:
            raise disk_error(error, Path(tempfile.gettempdir())) from error
    if run_dir.exists() and any(run_dir.iterdir()):
        raise HpctrainError(
            "HT-run-directory-taken", "{path} is not empty", "give --run-dir a new folder", path=run_dir
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir.resolve()
