"""``hpctrain checkpoint``: list, verify and export checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.options import AsJson
from hpctrain.common.checkpoints.find import newest_whole, scores, verify
from hpctrain.common.checkpoints.layout import MANIFEST, checkpoint_path, damaged_checkpoints, iterations
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, kept
from hpctrain.report.output import answer, answer_json, print_table, table, tell

if TYPE_CHECKING:
    from rich.table import Table

_DAMAGED = (
    "hpctrain run --resume skips damaged ones; where none is intact, restore one, or start with another --run-dir"
)

# The keys of what a checkpoint's manifest says.
_KNOWN = ("iteration", "epoch", "ends_epoch", "test_accuracy", "ranks", "bytes", "time")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="See, check and export the checkpoints of a run.")


def _named(text: str) -> Path:
    """The path that was given; for the word ``last`` the directory of the last run."""
    from hpctrain.control.schedulers.run_jobs import LAST, last_run

    return last_run() if text == LAST else Path(text)


RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|last",
        help="A run's directory, a folder in its checkpoints/, or the last run in hpctrain-runs/.",
        parser=_named,
    ),
]


@app.command("list")
def list_checkpoints(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|last", help="The directory of a run, or the last run in hpctrain-runs/.", parser=_named
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints, and which one --resume would use; only that one's hashes are compared."""
    rows = checkpoint_rows(RunDirectory(run_dir))
    if as_json:
        answer_json({"checkpoints": rows})
    elif rows:
        print_table(checkpoint_table(rows))
    else:
        tell(f"hpctrain: {run_dir} has no checkpoint yet")


@app.command("verify")
def verify_checkpoints(target: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """Check the length and hash of every file of a checkpoint, or of all checkpoints of a run. Exits 3 on any fault."""
    faults_of = {path: verify(path) for path in _paths(target)}
    faulty = any(faults_of.values())
    if as_json:
        rows = [{"path": str(path), "faults": faults} for path, faults in faults_of.items()]
        answer_json({"status": "failed" if faulty else "ok", "checkpoints": rows})
        if faulty:
            raise typer.Exit(3)
        return
    for path, faults in faults_of.items():
        answer(f"{path}: {'damaged' if faults else 'ok'}")
    if faulty:
        lines = "\n".join(fault for faults in faults_of.values() for fault in faults)
        raise HpctrainError("HT-checkpoint-damaged", "{lines}", _DAMAGED, exit_code=3, lines=lines)


@app.command()
def export(
    source: RunOrCheckpoint,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="OUT.pt or OUT.safetensors: a state_dict for PyTorch; OUT.keras: a model."),
    ],
) -> None:
    """Export the model of a checkpoint, or of a run's newest, to a file that its framework loads without hpctrain."""
    from hpctrain.control.programs.export import export as write

    checkpoint = source if _is_checkpoint(source) else _newest(source)
    answer(f"{out}: {write(checkpoint, out)} parameters of {checkpoint}")


def _is_checkpoint(path: Path) -> bool:
    with reading(path, "name a run directory that you may read"):
        return (path / MANIFEST).exists() or (path.is_dir() and path.name.startswith(("step-", "damaged-step-")))


def _paths(target: Path) -> list[Path]:
    """The checkpoint itself, or those of a run."""
    if _is_checkpoint(target):
        return [target]
    folder = require_checkpoints(RunDirectory(target))
    paths = [checkpoint_path(folder, iteration) for iteration in iterations(folder)]
    if not paths:
        raise HpctrainError("HT-checkpoint-none", "{target} has no checkpoint", exit_code=3, target=target)
    return paths


def _newest(run_dir: Path) -> Path:
    folder = require_checkpoints(RunDirectory(run_dir))
    newest = newest_whole(folder)
    for path, fault in newest.damaged:
        tell(f"hpctrain: {path} is damaged and was skipped: {fault}")
    if not newest.iteration:
        raise HpctrainError(
            "HT-checkpoint-none-intact",
            "{path} has no intact checkpoint",
            "" if newest.damaged else "a script saves its model by itself; a run of a recipe makes checkpoints",
            exit_code=3 if newest.damaged else 2,
            path=run_dir,
        )
    return checkpoint_path(folder, newest.iteration)


def checkpoint_rows(directory: RunDirectory) -> list[dict[str, Any]]:
    """The run's checkpoints, oldest first, then those that were set aside, with the keys of ``--json``.

    The ``state`` is ``newest`` (the one that --resume takes, checked by the hashes of its files), ``whole`` (checked by
    their lengths), ``damaged``, or ``set aside`` by an attempt that found it damaged. ``epoch`` is that of the last
    step, and ``ends_epoch`` whether that was its last; only then is there a ``test_accuracy`` of the model, from 0 to
    1. ``bytes`` are those of all ranks' shares, and ``time`` is when it was written, in seconds since the epoch. What
    is not known is None.
    """
    folder = require_checkpoints(directory)
    accuracies = scores(kept(EventsFile(directory.events).outline))
    newest = newest_whole(folder)
    faults = dict(newest.damaged)
    rows = []
    for iteration in iterations(folder):
        path = checkpoint_path(folder, iteration)
        fault = faults.get(path) or "; ".join(verify(path, hashes=False)) or None
        state = "damaged" if fault else "newest" if iteration == newest.iteration else "whole"
        rows.append(_row(path, state, fault, accuracies.get(iteration)))
    return rows + [_row(path, "set aside") for path in damaged_checkpoints(folder)]


def _row(path: Path, state: str, fault: str | None = None, accuracy: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_KNOWN)
    with contextlib.suppress(HpctrainError, OSError):
        manifest, written = read_manifest(path), (path / MANIFEST).stat().st_mtime
        of = manifest.progress
        known = (of.iteration, of.epoch, of.ends_epoch, accuracy, of.ranks, manifest.bytes, written)
        row = dict(zip(_KNOWN, known, strict=True))
    return {"path": str(path), "state": state, "fault": fault, **row}


def require_checkpoints(directory: RunDirectory) -> Path:
    """The folder of a run's checkpoints."""
    with reading(directory.path, "name a run directory that you may read"):
        there = directory.plan.exists() or directory.checkpoints.is_dir()
    if not there:
        raise HpctrainError(
            "HT-run-not-found",
            "{path} is not the directory of a run",
            "hpctrain run --run-dir names it",
            path=directory.path,
        )
    return directory.checkpoints


def checkpoint_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The table, with one row per checkpoint."""
    cells = []
    for row in rows:
        state = "newest, which --resume takes" if row["state"] == "newest" else row["state"]
        known = [""] * (len(_KNOWN) - 1)
        if row["iteration"] is not None:
            known = [
                str(row["iteration"]),
                f"{row['epoch']}{' end' if row['ends_epoch'] else ''}",
                "" if row["test_accuracy"] is None else f"{row['test_accuracy']:.4f}",
                str(row["ranks"]),
                f"{row['bytes'] / 1e6:.3f}",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])),
            ]
        cells.append([Path(row["path"]).name, *known, f"{state}: {row['fault']}" if row["fault"] else state])
    columns = ("checkpoint", "step", "epoch", "accuracy", "ranks", "MB", "written", "state")
    return table(columns, cells, left=("checkpoint", "written", "state"), folded=("state",))
