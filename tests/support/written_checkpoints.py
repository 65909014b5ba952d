"""Checkpoints of as many ranks as wanted, written by one process, and what is in them as another library reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from hpctrain.common.checkpoints.layout import checkpoint_path, hidden_path
from hpctrain.common.checkpoints.manifest import SavedProgress
from hpctrain.common.checkpoints.publish import publish, write_share
from hpctrain.common.checkpoints.share import CheckpointShare
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.single import SingleCommunicator


def progress_of(iteration: int, *, ranks: int = 1, **values: Any) -> SavedProgress:
    defaults = {"epoch": 1, "ends_epoch": False, "losses": (), "sizes": (), "samples": ""}
    return SavedProgress(iteration=iteration, ranks=ranks, **{**defaults, "epoch_seconds": 0, "seconds": 0, **values})


def guard_over(value: int = 0, comm: Communicator | None = None) -> Guard:
    """Of one parameter with one element; alone by default."""
    held = np.array([value], np.int64)
    return Guard(comm or SingleCommunicator("test"), ["a"], lambda: held, every=100)


def filled(tensors: Mapping[str, np.ndarray]) -> CheckpointShare:
    """A share that holds these."""
    share = CheckpointShare()
    share.prepare(tensors)
    share.fill(tensors)
    return share


def write_checkpoint(
    folder: Path, progress: SavedProgress, *shares: Mapping[str, np.ndarray], plan: Mapping[str, Any] | None = None
) -> Path:
    """One share a rank; with none every rank's is empty."""
    path = checkpoint_path(folder, progress.iteration)
    fresh = hidden_path(path, "test")
    # The run's directory, which writing a checkpoint does not make.
    folder.parent.mkdir(parents=True, exist_ok=True)
    each: Sequence[Mapping[str, np.ndarray]] = shares or ({},) * progress.ranks
    assert len(each) == progress.ranks
    for rank, tensors in enumerate(each):
        write_share(fresh, filled(tensors), rank, progress.ranks)
    publish(fresh, progress, dict(plan or {}), threading.Event(), seconds=10)
    return path


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """All of a checkpoint, by the names in its files."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}
