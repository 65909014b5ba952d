"""Saves and restores a training on all ranks of a run.

On each rank one thread copies its share in memory, for which the next update waits, and another writes the copy. Each
rank writes a part of what should be equal on all ranks; the first thread also takes the guard's checksums of all
parameters to prove that it is. Arrays that are divided over ranks are written by one of the ranks that hold the same
elements, and these ranks' checksums are compared. No checkpoint becomes visible where checksums differ, and before the
next update the ranks compare them and name what differs. The ranks find each other's shares on disk, so no thread sends
a message that could interfere with those of the training.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from hpctrain.common.checkpoints.find import Newest, Policy, delete_leftovers, delete_unkept, newest_whole
from hpctrain.common.checkpoints.layout import checkpoint_path, hidden_path, share_name
from hpctrain.common.checkpoints.manifest import CheckpointManifest, SavedProgress, read_manifest
from hpctrain.common.checkpoints.publish import publish, write_share
from hpctrain.common.checkpoints.read import read_state
from hpctrain.common.checkpoints.share import CheckpointShare
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import CheckpointEvent
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.worker.adapters.guard import Checksums, Guard
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.train.checkpoint_interval import CheckpointInterval
from hpctrain.worker.train.state import State, StateDivision, Stateful

T = TypeVar("T")

# The part of the collectives' time limit that a rank may wait for a disk, since the other ranks wait for it meanwhile.
_DISK_PART = 0.9
# The same for one rank's share: rank 0 can then still name the rank whose share is missing.
_SHARE_PART = 0.5
_POLL_SECONDS = 0.1


@dataclass(kw_only=True)
class _Save:
    """A checkpoint that is being written.

    Attributes:
        begin: when it was begun, by ``time.perf_counter``.
        guard_steps: after how many steps the guard's checksums were taken.
        copied: the guard's checksums; once they are there, training may change what is saved.
        written: when the share was on disk, and on rank 0 the manifest.
    """

    progress: SavedProgress
    begin: float
    guard: Guard
    guard_steps: int
    blocked_seconds: float = 0.0
    copied: Future[Checksums] = field(default_factory=Future)
    written: Future[tuple[float, CheckpointManifest | None]] = field(default_factory=Future)


class Checkpoints:
    """The checkpoints of one run, written one at a time. Deletes what a crash left of one; collective.

    Args:
        folder: on a file system that every rank sees.
        events: where rank 0 records the checkpoints.
        plan: the run's plan, for the manifests.
        scores: the test accuracies known already, by iteration; all ranks use rank 0's.
        interval: says when a checkpoint is due that no step and no epoch asks for; None for never.

    Attributes:
        newest: the iteration of the checkpoint to go back to, 0 for none. After :meth:`wait` and :meth:`abandon` it is
            the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        events: EventWriter,
        *,
        plan: Mapping[str, Any] | None = None,
        policy: Policy = Policy(),
        scores: Mapping[int, float] | None = None,
        interval: CheckpointInterval | None = None,
    ) -> None:
        self._folder = folder
        self._comm = comm
        self._events = events
        self._plan = dict(plan or {})
        self._policy = policy
        self._scores = dict(scores or {})
        self._interval = interval
        self._share = CheckpointShare()
        self._division = StateDivision(comm)
        self._limit = TIMEOUT.read()
        self._abandoned = threading.Event()
        self._save: _Save | None = None
        # The checkpoint whose checksums are still to be compared.
        self._uncompared: _Save | None = None
        # The last checkpoint whose share is on disk.
        self._done: _Save | None = None
        # The iteration of the last checkpoint that was begun.
        self._begun = 0
        self.newest = 0
        self._clean_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # A share is of no use without those of the other ranks, which may never come.
        self._abandoned.set()
        if self._comm.size == 1:
            with contextlib.suppress(HpctrainError):
                self._finish()

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock; False on the other ranks."""
        return self._interval is not None and self._comm.rank == 0 and self._interval.due

    def save(self, progress: SavedProgress, training: Stateful) -> None:
        """Start copying and writing the state; waits for the previous checkpoint, and for a GPU's tensors. Collective.

        Args:
            training: may go on. Before its next update it waits until the copy is done, and then proves that the copy
                was equal on all ranks, or raises.

        Raises:
            TransientError: the ranks' parameters differed in the previous checkpoint.
        """
        self._compare()
        begin = time.perf_counter()
        self._finish()
        part = self._division.own_part(training.state())
        guard = training.guard
        save = _Save(progress=progress, begin=begin, guard=guard, guard_steps=guard.steps)
        self._save = self._uncompared = save
        self._begun = progress.iteration
        training.before_update = self._compare
        work = partial(self._copy_and_write, save, part, self._comm.rank, dict(self._scores), self._abandoned)
        # A daemon, so that the process can end although the disk never answers.
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        save.blocked_seconds = time.perf_counter() - begin
        if self._interval:
            self._interval.saved()

    def record_written(self) -> None:
        """Record the checkpoint that was being written, if it is on disk by now.

        Raises:
            HpctrainError: it could not be written.
        """
        if self._save and self._save.written.done():
            self._finish()

    def wait(self) -> None:
        """Return on every rank once the checkpoint that is being written is on disk. Collective.

        Raises:
            TransientError: the ranks' parameters differed.
        """
        self._compare()
        self._finish()
        self._comm.agree()

    def abandon(self) -> bool:
        """After ranks died: give up the checkpoint that is being written, whose shares may be missing. Collective.

        What is on disk decides, as the rank that made a checkpoint visible may be dead. Call it again if another rank
        dies meanwhile.

        Returns:
            Whether the last checkpoint that was begun is missing and has to be saved again.
        """
        self._abandoned.set()
        self._uncompared = None
        save = self._save
        if save:
            self._await(save, save.written)
        begun = max(self._comm.allgather_object(self._begun))
        # No rank writes any more.
        self._clean_up()
        found = newest_whole(self._folder, hashes=False) if self._comm.rank == 0 else Newest()
        self.newest = self._comm.broadcast_object(found.iteration)
        self._save, self._abandoned = None, threading.Event()
        self._division = StateDivision(self._comm)
        if self._comm.rank == 0 and (last := save or self._done):
            self._record_for_dead_ranks(last)
        return self.newest < begun

    def scored(self, iteration: int, accuracy: float) -> None:
        """Record the test accuracy of the model in an iteration's checkpoint."""
        self._scores[iteration] = accuracy

    def restore(self, iteration: int, training: Stateful) -> SavedProgress:
        """Continue from the checkpoint of an iteration; the number of ranks may differ from then.

        Raises:
            HpctrainError: it cannot be read, or is of another model or optimizer.
        """
        path = checkpoint_path(self._folder, iteration)
        manifest, state = read_state(path, self._comm.rank, self._comm.size)
        try:
            training.restore(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise HpctrainError(
                "HT-checkpoint-of-other-model",
                "{path} belongs to another model or optimizer: {reason}",
                exit_code=1,
                path=path,
                reason=str(error),
            ) from error
        self.newest = iteration
        return manifest.progress

    def _compare(self) -> None:
        """Compare what the ranks hold of what was saved, as long as they still hold it."""
        save, self._uncompared = self._uncompared, None
        if save:
            begin = time.perf_counter()
            self._await(save, save.copied)
            save.guard.compare(save.guard_steps, save.copied.result())
            save.blocked_seconds += time.perf_counter() - begin

    def _copy_and_write(
        self, save: _Save, part: State, rank: int, scores: Mapping[int, float], abandoned: threading.Event
    ) -> None:
        """Copy the part and then write it; runs in its own thread."""
        fresh = self._fresh(save)

        def copy() -> Checksums:
            self._share.fill(part)
            # Frees arrays that were themselves made for this checkpoint.
            part.clear()
            return save.guard.checksums()

        def proof() -> dict[str, str]:
            return save.guard.proofs(save.copied.result())

        def write() -> tuple[float, CheckpointManifest | None]:
            try:
                return self._write(fresh, save.progress, rank, scores, abandoned, proof)
            finally:
                # Wait for the copying thread, so that nothing runs once this is reported as done.
                save.copied.exception()

        try:
            self._share.prepare(part)
        except Exception as error:
            save.copied.set_exception(error)
            save.written.set_exception(error)
            return
        threading.Thread(target=_fulfil, args=(save.copied, copy), name="checkpoint copy", daemon=True).start()
        _fulfil(save.written, write)

    def _write(
        self,
        fresh: Path,
        progress: SavedProgress,
        rank: int,
        scores: Mapping[int, float],
        abandoned: threading.Event,
        proof: Callable[[], Mapping[str, str]],
    ) -> tuple[float, CheckpointManifest | None]:
        """Write this rank's share; rank 0 also publishes the checkpoint once all shares have come."""
        write_share(fresh, self._share, rank, progress.ranks, proof=proof)
        if rank:
            return time.perf_counter(), None
        # The events on disk must reach at least as far as the checkpoint.
        self._events.synchronise()
        manifest = publish(fresh, progress, self._plan, abandoned, seconds=_SHARE_PART * self._limit)
        end = time.perf_counter()
        if manifest:
            delete_unkept(self._policy, self._folder, progress.iteration, scores)
        return end, manifest

    def _finish(self) -> None:
        save = self._save
        if save is None:
            return
        self._await(save, save.written)
        self._save, self._done = None, save
        end, manifest = save.written.result()
        self.newest = save.progress.iteration
        if manifest:
            self._record(save, end, manifest)

    def _record_for_dead_ranks(self, last: _Save) -> None:
        """Record a checkpoint whose rank 0 may have died after it published the checkpoint and before its event."""
        there = self.newest == last.progress.iteration
        if there and not self._events.tells_of_checkpoint(self.newest):
            end, _ = last.written.result()
            self._record(last, end, read_manifest(checkpoint_path(self._folder, self.newest)))

    def _record(self, save: _Save, end: float, manifest: CheckpointManifest) -> None:
        seconds = end - save.begin
        chosen = self._interval.measured(save.blocked_seconds, seconds) if self._interval else {}
        self._events.emit(
            CheckpointEvent(
                iteration=save.progress.iteration,
                epoch=save.progress.epoch,
                seconds=seconds,
                blocked_seconds=save.blocked_seconds,
                bytes=manifest.bytes,
                path=checkpoint_path(self._folder, save.progress.iteration).name,
                **chosen,
            )
        )

    def _await(self, save: _Save, future: Future[Any]) -> None:
        """Wait for a thread, and check meanwhile whether the other ranks live.

        Raises:
            RanksLostError: a rank died, whose share may never come.
            HpctrainError: the disk takes too long.
        """
        limit = _DISK_PART * self._limit
        deadline = time.monotonic() + limit
        while not wait([future], timeout=_POLL_SECONDS).done:
            if self._comm.lost:
                raise RanksLostError("HT-rank-died", "a rank died while {path} was written", path=self._fresh(save))
            if time.monotonic() > deadline:
                # Do not wait for it at the end either.
                self._save = None
                raise HpctrainError(
                    "HT-checkpoint-timed-out",
                    "rank {rank} on {host} waited {seconds:g} s until {path} was {state}",
                    f"does its file system answer? {TIMEOUT_HINT}",
                    exit_code=RESUMABLE,
                    rank=self._comm.rank,
                    host=self._comm.host,
                    seconds=limit,
                    path=self._fresh(save) / share_name(self._comm.rank, save.progress.ranks),
                    state="written" if save.copied.done() else "copied in memory",
                )

    def _fresh(self, save: _Save) -> Path:
        return hidden_path(checkpoint_path(self._folder, save.progress.iteration), self._token)

    def _clean_up(self) -> None:
        """Have rank 0 delete leftovers while no rank writes, and agree on its token and scores."""
        if self._comm.rank == 0:
            delete_leftovers(self._folder)
        # The token is in the names of unfinished shares, so that none of an earlier attempt is taken for one of this.
        self._token, self._scores = self._comm.broadcast_object((secrets.token_hex(4), self._scores))


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
