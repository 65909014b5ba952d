"""Lists the checkpoints of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.common.checkpoints.find import missing, newest_whole, verify
from hpctrain.common.checkpoints.keep import scores
from hpctrain.common.checkpoints.layout import checkpoint_path, damaged_checkpoints, iterations
from hpctrain.common.checkpoints.manifest import SavedProgress, read_manifest
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, kept
from hpctrain.common.run.events.kinds import CheckpointEvent, EpochEvent
from hpctrain.common.run.events.reader import BOUNDS

if TYPE_CHECKING:
    from rich.table import Table


class CheckpointRow(BaseModel):
    """One checkpoint; None where it is not known.

    Attributes:
        state: ``newest``, the one that --resume takes, checked by the hashes of its files; ``whole``, checked by their
            lengths; ``damaged``; ``missing``, recorded in the events alone; ``set aside`` by an attempt that found it
            damaged.
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
    state: Literal["newest", "whole", "damaged", "missing", "set aside"]
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
    outline = EventsFile(directory.events).outline(*BOUNDS, EpochEvent, CheckpointEvent)
    events = list(outline)
    accuracies = scores(kept(events))
    newest = newest_whole(folder)
    faults = dict(newest.damaged)
    rows = [
        CheckpointRow(path=checkpoint_path(folder, at), state="missing", iteration=at, test_accuracy=accuracies.get(at))
        for at in missing(folder, events)
    ]
    for iteration in iterations(folder):
        path = checkpoint_path(folder, iteration)
        fault = faults.get(path) or "; ".join(verify(path, hashes=False)) or None
        whole: Literal["newest", "whole"] = "newest" if iteration == newest.iteration else "whole"
        row = CheckpointRow(path=path, state="damaged" if fault else whole, fault=fault)
        rows.append(_known(row, accuracies.get(iteration)))
    rows.sort(key=lambda row: row.path)
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
    of: SavedProgress = manifest.progress
    known = {"iteration": of.iteration, "epoch": of.epoch, "ends_epoch": of.ends_epoch, "ranks": of.ranks}
    return row.model_copy(update={**known, "test_accuracy": accuracy, "bytes": manifest.bytes, "time": written})
