"""``hpctrain checkpoint``: list, verify and export checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import BaseModel, ConfigDict

from hpctrain.cli.options import AsJson
from hpctrain.common.checkpoints.find import newest_whole, verify
from hpctrain.common.checkpoints.keep import scores
from hpctrain.common.checkpoints.layout import MANIFEST, checkpoint_path, damaged_checkpoints, iterations
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, kept
from hpctrain.report.output import answer, answer_json, print_table, tell

if TYPE_CHECKING:
    from rich.table import Table

_DAMAGED = (
    "hpctrain run --resume skips damaged ones; where none is intact, restore one, or start with another --run-dir"
)

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
        answer_json({"checkpoints": [row.model_dump(mode="json") for row in rows]})
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
    """The checkpoint itself, or those of a run.

    Raises:
        HpctrainError: the run has none.
    """
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


class CheckpointRow(BaseModel):
    """One checkpoint; None where it is not known.

    Attributes:
        state: ``newest``, the one that --resume takes, checked by the hashes of its files; ``whole``, checked by their
            lengths; ``damaged``; ``set aside`` by an attempt that found it damaged.
        fault: what is wrong with a damaged one.
        iteration: the number of steps that were done.
        epoch: the epoch of the last of them, from 1.
        ends_epoch: whether that was the epoch's last step.
        test_accuracy: the accuracy of its model, from 0 to 1; only one that ends an epoch has it.
        bytes: the size of all ranks' shares.
        time: when it was written, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    path: Path
    state: Literal["newest", "whole", "damaged", "set aside"]
    fault: str | None = None
    iteration: int | None = None
    epoch: int | None = None
    ends_epoch: bool | None = None
    test_accuracy: float | None = None
    ranks: int | None = None
    bytes: int | None = None
    time: float | None = None


def checkpoint_rows(directory: RunDirectory) -> list[CheckpointRow]:
    """The run's checkpoints, oldest first, then those that were set aside.

    Raises:
        HpctrainError: this is no run's directory, or its events are damaged.
    """
    folder = require_checkpoints(directory)
    accuracies = scores(kept(EventsFile(directory.events).outline))
    newest = newest_whole(folder)
    faults = dict(newest.damaged)
    rows = []
    for iteration in iterations(folder):
        path = checkpoint_path(folder, iteration)
        fault = faults.get(path) or "; ".join(verify(path, hashes=False)) or None
        whole: Literal["newest", "whole"] = "newest" if iteration == newest.iteration else "whole"
        row = CheckpointRow(path=path, state="damaged" if fault else whole, fault=fault)
        rows.append(_known(row, accuracies.get(iteration)))
    return rows + [_known(CheckpointRow(path=path, state="set aside")) for path in damaged_checkpoints(folder)]


def require_checkpoints(directory: RunDirectory) -> Path:
    """The folder of a run's checkpoints.

    Raises:
        HpctrainError: this is no run's directory.
    """
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


def checkpoint_table(rows: Iterable[CheckpointRow]) -> Table:
    """The table, with one row per checkpoint."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("checkpoint", "step", "epoch", "accuracy", "ranks", "MB", "written", "state"):
        right = column in ("step", "epoch", "accuracy", "ranks", "MB")
        table.add_column(column, no_wrap=column != "state", justify="right" if right else "left")
    for row in rows:
        written = "" if row.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time))
        state = "newest, which --resume takes" if row.state == "newest" else row.state
        table.add_row(
            Text(row.path.name),
            "" if row.iteration is None else str(row.iteration),
            "" if row.epoch is None else f"{row.epoch}{' end' if row.ends_epoch else ''}",
            "" if row.test_accuracy is None else f"{row.test_accuracy:.4f}",
            "" if row.ranks is None else str(row.ranks),
            "" if row.bytes is None else f"{row.bytes / 1e6:.3f}",
            written,
            Text(f"{state}: {row.fault}" if row.fault else state),
        )
    return table


def _known(row: CheckpointRow, accuracy: float | None = None) -> CheckpointRow:
    """The row with what the checkpoint's manifest says, if that can be read."""
    try:
        manifest = read_manifest(row.path)
        written = (row.path / "state.json").stat().st_mtime
    except (HpctrainError, OSError):
        return row
    of = manifest.progress
    known = {"iteration": of.iteration, "epoch": of.epoch, "ends_epoch": of.ends_epoch, "ranks": of.ranks}
    return row.model_copy(update={**known, "test_accuracy": accuracy, "bytes": manifest.bytes, "time": written})
