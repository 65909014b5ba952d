"""Makes a checkpoint from the shares of all ranks: receipts, the manifest, and one rename that makes it visible."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.common.checkpoints.keep import hide
from hpctrain.common.checkpoints.layout import checkpoint_path, share_name
from hpctrain.common.checkpoints.manifest import CheckpointManifest, FileRecord, SavedProgress, write_manifest
from hpctrain.common.checkpoints.share import CheckpointShare
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.files.disk import disk_error, synchronise_folder
from hpctrain.common.files.regular import make_folder, private
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.directory import read_model
from hpctrain.common.run.stopping import RESUMABLE

_POLL_SECONDS = 0.005
# Nobody waits much longer than it takes.
_POLL_GROWTH = 1.2
_MOST_POLL_SECONDS = 0.5
_RECEIPT = ".receipt"


class _Receipt(FrozenModel):
    """A rank's statement that its share is on disk."""

    file: FileRecord
    proof: dict[str, str]


def write_share(
    fresh: Path, share: CheckpointShare, rank: int, ranks: int, *, proof: Callable[[], Mapping[str, str]] = dict
) -> None:
    """Write a rank's share and its receipt into a new checkpoint; both or neither.

    Args:
        fresh: where the checkpoint is made.
        rank, ranks: the number of the rank, and how many ranks there are.
        proof: tells what has to be the same on ranks, lest each writes a part of another state: a value for each group
            of ranks that hold the same, under a name that the group alone has.

    Raises:
        HpctrainError: the disk is full, or refuses.
    """
    path = fresh / share_name(rank, ranks)
    part = path.with_suffix(".part")
    try:
        # The first rank to arrive creates the folder.
        make_folder(fresh, within=fresh.parent.parent)
        receipt = _Receipt(file=share.write(path), proof=dict(proof())).model_dump_json()
        # The receipt is not synced to disk, unlike the share: nothing needs it after the machine crashes.
        with open(part, "w", opener=private) as file:
            file.write(receipt)
        part.replace(path.with_suffix(_RECEIPT))
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def publish(
    fresh: Path,
    progress: SavedProgress,
    plan: dict[str, Any],
    abandoned: threading.Event,
    *,
    seconds: float,
) -> CheckpointManifest | None:
    """Wait for all shares and make the checkpoint visible; one that fails is deleted. Called on one rank.

    Args:
        fresh: where the shares are written.
        abandoned: an event that ends the waiting early.
        seconds: how long to wait from one share to the next: disks of clusters have been seen to stand still for
            minutes.

    Returns:
        What it then says of itself; None where it was abandoned.

    Raises:
        TransientError: the ranks' proofs differ.
        HpctrainError: shares did not come, or the disk is full or refuses.
    """
    try:
        receipts = _receipts(fresh, progress.ranks, abandoned, seconds)
        if receipts is None:
            return None
        if not _agree(receipt.proof for receipt in receipts.values()):
            path = checkpoint_path(fresh.parent, progress.iteration)
            raise TransientError(
                "HT-parameters-differ",
                "the ranks hold different parameters, so {path} is abandoned",
                exit_code=1,
                path=path,
            )
        files = {name: receipt.file for name, receipt in receipts.items()}
        manifest = CheckpointManifest(progress=progress, plan=plan, files=files)
        write_manifest(fresh, manifest)
        for name in files:
            (fresh / name).with_suffix(_RECEIPT).unlink()
        synchronise_folder(fresh)
        _rename(fresh, checkpoint_path(fresh.parent, progress.iteration))
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise disk_error(error, fresh) from error
    except HpctrainError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return manifest


def _agree(proofs: Iterable[Mapping[str, str]]) -> bool:
    """Whether the ranks of each group have equal proofs."""
    known: dict[str, str] = {}
    return all(known.setdefault(group, value) == value for proof in proofs for group, value in proof.items())


def _rename(fresh: Path, path: Path) -> None:
    """Give a complete checkpoint its name, and replace one that lost steps left behind."""
    gone = hide(path)
    fresh.replace(path)
    synchronise_folder(path.parent)
    # The first one has made the folder.
    synchronise_folder(path.parent.parent)
    if gone:
        shutil.rmtree(gone, ignore_errors=True)


def _receipts(fresh: Path, ranks: int, abandoned: threading.Event, seconds: float) -> dict[str, _Receipt] | None:
    """The receipts of all shares, in rank order; None if the checkpoint was abandoned."""
    names = [share_name(rank, ranks) for rank in range(ranks)]
    missing, deadline, poll = names, time.monotonic() + seconds, _POLL_SECONDS
    while missing:
        there = {path.name for path in fresh.iterdir()}
        still = [name for name in missing if Path(name).with_suffix(_RECEIPT).name not in there]
        if len(still) < len(missing):
            missing, deadline, poll = still, time.monotonic() + seconds, _POLL_SECONDS
        elif time.monotonic() > deadline:
            raise HpctrainError(
                "HT-checkpoint-timed-out",
                "{fresh}: no rank's share arrived within {seconds:g} s; missing: {missing}{more}",
                "is the file system of the run directory the same on all hosts, and does it answer?",
                exit_code=RESUMABLE,
                fresh=fresh,
                seconds=seconds,
                missing=", ".join(missing[:10]),
                more=f" and {len(missing) - 10} more" if len(missing) > 10 else "",
            )
        elif abandoned.wait(poll):
            return None
        poll = min(_POLL_GROWTH * poll, _MOST_POLL_SECONDS)
    return {name: read_model((fresh / name).with_suffix(_RECEIPT), _Receipt) for name in names}
