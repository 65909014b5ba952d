"""Decides which checkpoints are kept, and deletes the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.checkpoints.layout import checkpoint_path, hidden, hidden_path, iterations
from hpctrain.common.checkpoints.manifest import SavedProgress, read_manifest
from hpctrain.common.errors import HpctrainError
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


def apply(policy: Policy, folder: Path, newest: int, scores: Mapping[int, float]) -> None:
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


def clear(folder: Path) -> None:
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
