"""``hpctrain remove``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RUNS, RunDirectory
from hpctrain.report.output import answer, tell

if TYPE_CHECKING:
    from hpctrain.report.runs import RunRow

_DAY = 86400.0
# A damaged run's processes cannot be looked for.
_ALIVE, _ENDED = ("running", "waiting", "damaged"), ("done", "failed")


def remove(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN…]", help="Directories or jobs of runs, of arrays.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Those in hpctrain-runs/ that recorded nothing for so many days."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")] = False,
) -> None:
    """Delete the directories of runs that have ended, with their checkpoints and logs.

    A link in a run's directory is deleted, and what it leads to stays.
    """
    if bool(targets) == (older_than is not None):
        raise HpctrainError(
            "HT-argument-missing", "remove needs runs, or their least age", "hpctrain remove RUN… or --older-than 30"
        )
    found = _older(time.time() - _DAY * older_than) if older_than is not None else _named(targets or [])
    for path in found:
        try:
            if not dry_run:
                shutil.rmtree(path)
        except OSError as error:
            raise disk_error(error, path, "its owner can remove it") from error
        answer(f"{'would remove' if dry_run else 'removed'} {shell_word(path)}")
    if not found:
        answer("nothing to remove")


def _named(targets: Sequence[str]) -> list[Path]:
    """The directories of these runs, each of which may be removed.

    Raises:
        HpctrainError: one may not.
    """
    from hpctrain.control.schedulers.find_run import find_run
    from hpctrain.report.runs import list_runs

    paths = [Path(each) if os.path.isdir(each) else find_run(each).directory.path for each in targets]  # noqa: PTH112
    paths = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 - Path.resolve follows the last link
    for path in paths:
        if refusal := _refusal(path, *list_runs(path.parent, escape(path.name))):
            raise refusal
    return paths


def _older(moment: float) -> list[Path]:
    """The folders in which no run recorded anything since; it is said of those that may not be removed."""
    from hpctrain.report.runs import list_runs

    rows, problem = list_runs(RUNS)
    found = []
    for name in dict.fromkeys(Path(row.name).parts[0] for row in rows):
        path, own = RUNS / name, [row for row in rows if Path(row.name).parts[0] == name]
        if max(row.time for row in own) >= moment:
            continue
        if refusal := _refusal(path, own, problem):
            tell(f"hpctrain: kept: {refusal.message}")
        else:
            found.append(path)
    return found


def _refusal(path: Path, rows: Sequence[RunRow], problem: str | None) -> HpctrainError | None:
    """Why a folder with these runs is not removed: one of them may be alive, or other things are in it.

    Args:
        problem: why Slurm does not answer, whose jobs may be those of any run that is not known to have ended.
    """
    directory = RunDirectory(path)
    if not rows or not (directory.plan.exists() or directory.submission.exists()):
        hint = "name the directories that `hpctrain run` or `hpctrain submit` made"
        return HpctrainError("HT-run-not-found", "{place} is no run or array", hint, place=path)
    for row in rows:
        if row.state in _ALIVE or (problem and row.state not in _ENDED):
            hint = f"hpctrain cancel {shell_word(row.run_dir)} ends it"
            return HpctrainError(
                "HT-remove-alive",
                "{path} may be alive, it is {state}: {reason}",
                hint,
                path=row.run_dir,
                state=row.state,
                reason=problem or row.message or "its processes are there",
            )
    inside = {Path.cwd(), path / ".git", *(row.plan.script.path for row in rows if row.plan and row.plan.script)}
    for other in inside:
        if path.is_symlink() or (other.exists() and other.resolve().is_relative_to(path.resolve())):
            what = "is a link" if path.is_symlink() else f"holds {other}"
            return HpctrainError(
                "HT-remove-not-a-run-alone",
                "{path} {what}, which no run made",
                "remove by hand what is not needed",
                path=path,
                what=what,
            )
    return None
