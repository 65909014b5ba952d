"""Saves and restores a training on all ranks of a run.

A thread of each rank copies its share in memory, for which the next update waits, and another writes what is copied.
Each rank writes a part of what is equal on all, if it is: the first thread also takes the guard's checksums of all
parameters. Of what is divided over ranks, one of those that hold the same elements writes them, and the checksums of
these are compared. No checkpoint becomes visible where they differ, and ahead of the next update the ranks compare
them, and name what differs. The ranks find each other's shares on the disk, so no message of a thread can get between
those of the training.
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
from types import TracebackType
from typing import Any, Self, TypeVar

from hpctrain.common.checkpoints import keep
from hpctrain.common.checkpoints.find import Newest, newest_whole
from hpctrain.common.checkpoints.keep import Policy
from hpctrain.common.checkpoints.layout import checkpoint_path, hidden_path, iterations, share_name
from hpctrain.common.checkpoints.manifest import CheckpointManifest, SavedProgress, read_manifest
from hpctrain.common.checkpoints.publish import publish, write_share
from hpctrain.common.checkpoints.read import read_state
from hpctrain.common.checkpoints.share import CheckpointShare
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import CheckpointEvent
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.replicas import Checksums
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.train.division import Division
from hpctrain.worker.train.state import State, Stateful

T = TypeVar("T")

# How much of the limit of collectives a rank waits for a disk: the others wait for it meanwhile.
_OWN_PART = 0.9
# The same for one rank's share: whoever waits for it in vain can still name it.
_SHARE_PART = 0.5
_LOOK_SECONDS = 0.1


@dataclass(kw_only=True)
class _Save:
    """A checkpoint that is being written.

    Attributes:
        progress: how far the training was.
        begin: ``time.perf_counter`` of its begin.
        blocked_seconds: how long training waited.
        guard, guard_steps: what compares the checksums, and after how many steps they were taken.
        copied: when training may go on to change what is saved; the guard's checksums.
        written: when it was on disk, and on rank 0 its manifest.
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
        folder: for all of them; a file system that every rank sees.
        comm: the ranks.
        events: where rank 0 records them.
        plan: of the run, for the manifests.
        policy: which are kept.
        scores: test accuracies that are known already, by iteration; rank 0's are every rank's.

    Attributes:
        newest: the iteration of the one to go back to, 0 for none. After :meth:`wait` and :meth:`abandon` it is the
            same on all ranks.
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
    ) -> None:
        self._folder = folder
        self._comm = comm
        self._events = events
        self._plan = dict(plan or {})
        self._policy = policy
        self._scores = dict(scores or {})
        self._share = CheckpointShare()
        self._division = Division(comm)
        self._limit = TIMEOUT.read()
        self._abandoned = threading.Event()
        self._save: _Save | None = None
        # The one whose checksums are still to be compared.
        self._unproved: _Save | None = None
        # The last one whose share is on disk.
        self._done: _Save | None = None
        # Of the last one that was begun.
        self._begun = 0
        self.newest = 0
        self._begin_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is written then is of no use without the other ranks' shares, which may never come.
        self._abandoned.set()
        if self._comm.size == 1:
            with contextlib.suppress(HpctrainError):
                self._finish()

    def save(self, progress: SavedProgress, training: Stateful) -> None:
        """Start copying and writing the state; waits for the previous checkpoint. Collective.

        Args:
            progress: how far the training is.
            training: may go on. Ahead of its next update it waits until the copy is done, and proves then that it was
                equal on all ranks, or raises.

        Raises:
            TransientError: the ranks' parameters differed at the one before.
        """
        self._prove()
        begin = time.perf_counter()
        self._finish()
        part = self._division.own_part(training.state())
        guard = training.guard
        save = _Save(progress=progress, begin=begin, guard=guard, guard_steps=guard.steps)
        self._save = self._unproved = save
        self._begun = progress.iteration
        training.before_update = self._prove
        work = partial(self._copy_and_write, save, part, self._comm.rank, dict(self._scores), self._abandoned)
        # Not one that the end of the process waits for: a disk may never answer.
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        save.blocked_seconds = time.perf_counter() - begin

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
        self._prove()
        self._finish()
        self._comm.agree()

    def abandon(self) -> bool:
        """After ranks died: give up the checkpoint that is being written, whose shares may be missing. Collective.

        What is on disk decides, as whoever made a checkpoint visible may be dead. After another death on the way it is
        to be called again.

        Returns:
            Whether the last that was begun is not there, and is to be saved again.
        """
        self._abandoned.set()
        self._unproved = None
        save = self._save
        if save:
            self._await(save, save.written)
        begun = max(self._comm.allgather_object(self._begun))
        # Nobody writes any more.
        self._begin_anew()
        found = newest_whole(self._folder, hashes=False) if self._comm.rank == 0 else Newest()
        self.newest = self._comm.broadcast_object(found.iteration)
        self._save, self._abandoned = None, threading.Event()
        self._division = Division(self._comm)
        if self._comm.rank == 0 and (last := save or self._done):
            self._tell_for_the_dead(last)
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
            raise HpctrainError(f"{path} belongs to another model or optimizer: {error}", exit_code=1) from error
        self.newest = iteration
        return manifest.progress

    def _prove(self) -> None:
        """Compare what the ranks hold of what was saved, as long as they still hold it."""
        save, self._unproved = self._unproved, None
        if save:
            begin = time.perf_counter()
            self._await(save, save.copied)
            save.guard.compare(save.guard_steps, save.copied.result())
            save.blocked_seconds += time.perf_counter() - begin

    def _copy_and_write(
        self, save: _Save, part: State, rank: int, scores: Mapping[int, float], abandoned: threading.Event
    ) -> None:
        """In a thread of its own."""
        fresh = self._fresh(save)

        def copy() -> Checksums:
            self._share.fill(part)
            # It may be a copy itself.
            part.clear()
            return save.guard.checksums()

        def proof() -> dict[str, str]:
            return save.guard.proofs(save.copied.result())

        def write() -> tuple[float, CheckpointManifest | None]:
            try:
                return self._write(fresh, save.progress, rank, scores, abandoned, proof)
            finally:
                # Nobody copies any more when this is said to be over.
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
        """This rank's share; on rank 0 also the rest, when all have come."""
        write_share(fresh, self._share, rank, progress.ranks, proof=proof)
        if rank:
            return time.perf_counter(), None
        # No checkpoint is newer than the events of its steps.
        self._events.synchronise()
        manifest = publish(fresh, progress, self._plan, abandoned, seconds=_SHARE_PART * self._limit)
        end = time.perf_counter()
        if manifest:
            keep.apply(self._policy, self._folder, progress.iteration, scores)
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
            self._tell(save, end, manifest)

    def _tell_for_the_dead(self, last: _Save) -> None:
        """The rank that made it visible may have died before it recorded that."""
        there = self.newest == last.progress.iteration
        if there and not self._events.tells_of_checkpoint(self.newest):
            end, _ = last.written.result()
            self._tell(last, end, read_manifest(checkpoint_path(self._folder, self.newest)))

    def _tell(self, save: _Save, end: float, manifest: CheckpointManifest) -> None:
        self._events.emit(
            CheckpointEvent(
                iteration=save.progress.iteration,
                epoch=save.progress.epoch,
                seconds=end - save.begin,
                blocked_seconds=save.blocked_seconds,
                bytes=manifest.bytes,
                path=checkpoint_path(self._folder, save.progress.iteration).name,
                kept=tuple(iterations(self._folder)),
            )
        )

    def _await(self, save: _Save, future: Future[Any]) -> None:
        """Wait for the writing thread, and look meanwhile whether the other ranks live.

        Raises:
            RanksLostError: one died, whose share may never come.
            HpctrainError: it takes too long.
        """
        limit = _OWN_PART * self._limit
        deadline = time.monotonic() + limit
        while not wait([future], timeout=_LOOK_SECONDS).done:
            if self._comm.lost:
                raise RanksLostError(f"a rank died while {self._fresh(save)} was written")
            if time.monotonic() > deadline:
                # Nor at the end.
                self._save = None
                raise HpctrainError(
                    f"rank {self._comm.rank} on {self._comm.host} waited {limit:g} s until "
                    f"{self._fresh(save) / share_name(self._comm.rank, save.progress.ranks)} was "
                    f"{'written' if save.copied.done() else 'copied in memory'}",
                    f"does its file system answer? {TIMEOUT_HINT}",
                    exit_code=RESUMABLE,
                )

    def _fresh(self, save: _Save) -> Path:
        return hidden_path(checkpoint_path(self._folder, save.progress.iteration), self._token)

    def _begin_anew(self) -> None:
        """Have rank 0 clear up, as long as nobody writes, and agree on what it knows."""
        if self._comm.rank == 0:
            keep.clear(self._folder)
        # The token is part of the names of what is being written: no share of an attempt that died is taken for one of
        # this.
        self._token, self._scores = self._comm.broadcast_object((secrets.token_hex(4), self._scores))


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
