"""Finds the newest whole checkpoint, renames damaged ones, and deletes those that are not kept."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpctrain.common.checkpoints.layout import DAMAGED, checkpoint_path, hidden, hidden_path, iterations
from hpctrain.common.checkpoints.manifest import FileRecord, OtherVersionError, SavedProgress, read_manifest
from hpctrain.common.checkpoints.read import read_index
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import open_regular
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import EpochEvent, StartEvent, StepEvent


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which checkpoints are kept: the newest ``last``, the ``best`` by test accuracy, the last of every few epochs."""

    last: int = 2
    best: bool = False
    every_epochs: int | None = None

    def kept(self, known: Mapping[int, SavedProgress], scores: Mapping[int, float]) -> set[int]:
        """The iterations whose checkpoints are kept."""
        found = set(sorted(known)[-self.last :])
        if self.best and (scored := known.keys() & scores.keys()):
            # Of equal scores the earlier wins, because it is the one that was kept so far.
            found.add(max(scored, key=lambda iteration: (scores[iteration], -iteration)))
        if every := self.every_epochs:
            found |= {number for number, each in known.items() if each.ends_epoch and each.epoch % every == 0}
        return found


def delete_unkept(policy: Policy, folder: Path, newest: int, scores: Mapping[int, float]) -> None:
    """Delete the checkpoints that the policy does not keep, and those of lost steps after the newest.

    What cannot be deleted stays; what cannot be read stays as long as one is kept that is older.
    """
    there = {iteration: _progress(folder, iteration) for iteration in iterations(folder)}
    known = {iteration: each for iteration, each in there.items() if each and iteration <= newest}
    kept = policy.kept(known, scores)
    if newest not in kept:
        # The newest checkpoint cannot be read at the moment, so the older ones are still needed.
        return
    for iteration, progress in there.items():
        unreadable = progress is None and min(kept) < iteration < newest
        if iteration not in kept and not unreadable:
            delete(checkpoint_path(folder, iteration))


def delete_leftovers(folder: Path) -> None:
    """Delete what crashes left. Nobody may be writing; it may be what fills the disk. What cannot be deleted stays."""
    for path in hidden(folder):
        shutil.rmtree(path, ignore_errors=True)


def scores(events: Iterable[Event]) -> dict[int, float]:
    """The test accuracy by the iteration of the last step before the evaluation, which may be of an earlier attempt."""
    found, iteration = {}, 0
    for event in events:
        if isinstance(event, StepEvent | StartEvent):
            iteration = event.iteration
        elif isinstance(event, EpochEvent) and event.test_accuracy is not None:
            found[iteration] = event.test_accuracy
    return found


def _progress(folder: Path, iteration: int) -> SavedProgress | None:
    """The progress in a checkpoint; None if it cannot be read."""
    try:
        return read_manifest(checkpoint_path(folder, iteration)).progress
    except HpctrainError:
        return None


def delete(path: Path) -> None:
    """Delete a checkpoint so that a crash in the middle leaves nothing that looks like a damaged one.

    What cannot be deleted stays.
    """
    if gone := hide(path):
        shutil.rmtree(gone, ignore_errors=True)


def hide(path: Path) -> Path | None:
    """Rename a checkpoint that is to be deleted; None if it is not there or cannot be renamed."""
    gone = hidden_path(path, "deleted")
    # A crash during an earlier deletion left this folder.
    shutil.rmtree(gone, ignore_errors=True)
    try:
        return path.replace(gone)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest whole checkpoint.

    Attributes:
        iteration: 0 where there is none.
        damaged: newer ones, the newest first, each with what is wrong with it.
    """

    iteration: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()


def newest_whole(folder: Path, *, hashes: bool = True) -> Newest:
    """Find the newest whole checkpoint in ``folder``, by the lengths and hashes of its files.

    It may be looked for while a run writes new ones and deletes old ones.

    Raises:
        OtherVersionError: the newest that is not damaged cannot be read by this hpctrain.
    """
    before: list[int] = []
    while True:
        damaged: list[tuple[Path, str]] = []
        there, overtaken = iterations(folder), False
        for iteration in reversed(there):
            path = checkpoint_path(folder, iteration)
            if not (faults := verify(path, hashes=hashes)):
                return Newest(iteration=iteration, damaged=tuple(damaged))
            if os.path.lexists(path):
                damaged.append((path, "; ".join(faults)))
            else:
                overtaken = True
        # If some listed checkpoints are gone, newer ones have replaced them, so the search starts again.
        if not overtaken or there == before:
            return Newest(damaged=tuple(damaged))
        before = there


def verify(path: Path, *, hashes: bool = True) -> list[str]:
    """The faults of a checkpoint; empty if every file matches its manifest.

    Args:
        hashes: compare the contents of the shares too, not only their lengths, and look whether the pieces of each
            array make all of it.

    Raises:
        OtherVersionError: another version wrote it, so this one cannot judge it.
    """
    try:
        manifest = read_manifest(path)
    except OtherVersionError:
        raise
    except HpctrainError as error:
        return [error.message]
    if checkpoint_path(path.parent, manifest.progress.iteration) != path and path.name.startswith("step-"):
        return [f"{path} is from step {manifest.progress.iteration}"]
    faults = [fault for name, record in manifest.files.items() if (fault := _fault(path / name, record, hashes))]
    if faults or not hashes:
        return faults
    try:
        read_index(path, manifest)
    except HpctrainError as error:
        return [error.message]
    return []


def require_whole(path: Path) -> None:
    """Refuse a checkpoint that is damaged."""
    if faults := verify(path):
        raise HpctrainError(
            "HT-checkpoint-damaged",
            "{lines}",
            "hpctrain checkpoint list RUN_DIR shows those that are whole",
            exit_code=3,
            lines="\n".join(faults),
        )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that nothing looks for it; returns the new path."""
    free, number = path.with_name(f"{DAMAGED}{path.name}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{DAMAGED}{path.name}-{number}")
    try:
        return path.rename(free)
    except OSError as error:
        raise disk_error(error, path) from error


def _fault(path: Path, record: FileRecord, hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path} has {size} bytes instead of {record.bytes}"
        if not hashes:
            return None
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return None if digest == record.xxh128 else f"{path} is not what was written: its hash differs"
