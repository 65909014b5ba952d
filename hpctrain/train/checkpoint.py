"""Saving and restoring a training on all ranks of a run.

A thread of each rank copies its share in memory, for which the next update waits, and writes it then. The ranks find
each other's shares on the disk, so no message of theirs can get between those of the training.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from hpctrain.checkpoints import keep
from hpctrain.checkpoints.keep import Policy
from hpctrain.checkpoints.layout import OWN, checkpoint_path, hidden_path, shares
from hpctrain.checkpoints.manifest import Manifest, Progress
from hpctrain.checkpoints.publish import publish, write_share
from hpctrain.checkpoints.read import read_state
from hpctrain.checkpoints.share import Share
from hpctrain.comm import Communicator
from hpctrain.errors import HpctrainError
from hpctrain.events import EventWriter

State = dict[str, NDArray[Any]]

# What the guard has counted: part of the state of every trainer.
GUARD_STEPS = "guard.steps"


class Stateful(Protocol):
    """What has a state.

    Attributes:
        before_update: called ahead of every change of what :meth:`state` gives, but for what is this rank's own.
    """

    before_update: Callable[[], None]

    def state(self) -> State:
        """All that decides the bits of what follows, by name; what begins as :data:`OWN` says is this rank's own.

        The arrays may be those that training goes on in.
        """

    def restore(self, state: State) -> None:
        """Go on from a state; what is a rank's own may be missing."""


@dataclass(kw_only=True)
class _Save:
    """A checkpoint that is being written.

    Attributes:
        progress: how far the training was.
        begin: ``time.perf_counter`` of its begin.
        blocked_seconds: how long training waited.
        copied: when training may go on to change what is saved.
        written: when it was on disk, and on rank 0 its manifest.
    """

    progress: Progress
    begin: float
    blocked_seconds: float
    copied: Future[None]
    written: Future[tuple[float, Manifest | None]]


class Checkpoints:
    """The checkpoints of one run. One is written at a time.

    Args:
        folder: for all of them; a file system that every rank sees.
        comm: the ranks.
        events: where rank 0 records them.
        plan: of the run, for the manifests.
        policy: which are kept.
        scores: test accuracies that are known already, by iteration.
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
        self._share = Share()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._abandoned = threading.Event()
        self._token = self._new_token()
        self._save: _Save | None = None
        self.newest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is written then is of no use without the other ranks' shares, which may never come.
        self._abandoned.set()
        self._writer.shutdown(wait=False)

    def save(self, progress: Progress, training: Stateful) -> None:
        """Have the state copied and written; waits for the one before."""
        begin = time.perf_counter()
        self._finish()
        part = self._own_part(training.state(), progress.ranks)
        training.before_update = self._wait_for_copy
        copied = self._writer.submit(self._share.take, part)
        written = self._writer.submit(
            self._write, copied, progress, self._comm.rank, dict(self._scores), self._abandoned
        )
        blocked = time.perf_counter() - begin
        self._save = _Save(progress=progress, begin=begin, blocked_seconds=blocked, copied=copied, written=written)

    def settle(self) -> None:
        """Record what was being written, if it is on disk by now.

        Raises:
            HpctrainError: it could not be written.
        """
        if self._save and self._save.written.done():
            self._finish()

    def wait(self) -> None:
        """Return on every rank when what is being written is on disk. Collective."""
        self._finish()
        self._comm.agree()

    def abandon(self) -> bool:
        """After ranks died: give up what is being written, whose shares will not all come. Collective.

        Returns:
            Whether there was something on any rank, which is to be saved again.
        """
        self._abandoned.set()
        lost, self._save = self._save, None
        if lost:
            lost.written.exception()
        self._abandoned = threading.Event()
        self._token = self._new_token()
        return any(self._comm.allgather_object(lost is not None))

    def scored(self, iteration: int, accuracy: float) -> None:
        """The test accuracy of the model that the checkpoint of an iteration is of."""
        self._scores[iteration] = accuracy

    def restore(self, iteration: int, training: Stateful) -> Progress:
        """Go on from the checkpoint of an iteration; the number of ranks may be another than then.

        Raises:
            HpctrainError: it cannot be read, or is of another model or optimizer.
        """
        path = checkpoint_path(self._folder, iteration)
        manifest, state = read_state(path, self._comm.rank, self._comm.size)
        try:
            training.restore(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise HpctrainError(f"{path} is of another model or optimizer: {error}", exit_code=1) from error
        self.newest = iteration
        return manifest.progress

    def _wait_for_copy(self) -> None:
        save = self._save
        if save and not save.copied.done():
            begin = time.perf_counter()
            # What went wrong is told where it was to be written.
            save.copied.exception()
            save.blocked_seconds += time.perf_counter() - begin

    def _own_part(self, state: State, ranks: int) -> State:
        """What this rank writes: its part of what is equal on all, and what is its own under its number."""
        rank = self._comm.rank
        # What is a rank's own is small, and the next forward pass changes it.
        own = {f"{name}.{rank}": value.copy() for name, value in state.items() if name.startswith(OWN)}
        sizes = ((name, value.nbytes) for name, value in state.items() if not name.startswith(OWN))
        return {name: state[name] for name in shares(sizes, ranks)[rank]} | own

    def _write(
        self,
        copied: Future[None],
        progress: Progress,
        rank: int,
        scores: Mapping[int, float],
        abandoned: threading.Event,
    ) -> tuple[float, Manifest | None]:
        """In the writer's thread: this rank's share; on rank 0 also the rest, when all have come."""
        copied.result()
        fresh = hidden_path(checkpoint_path(self._folder, progress.iteration), self._token)
        write_share(fresh, self._share, rank, progress.ranks)
        if rank:
            return time.perf_counter(), None
        manifest = publish(fresh, progress, self._plan, abandoned)
        end = time.perf_counter()
        keep.apply(self._policy, self._folder, progress.iteration, scores, token=self._token)
        return end, manifest

    def _finish(self) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        end, manifest = save.written.result()
        self.newest = save.progress.iteration
        if manifest:
            self._events.emit(
                "checkpoint",
                iteration=save.progress.iteration,
                epoch=save.progress.epoch,
                seconds=end - save.begin,
                blocked_seconds=save.blocked_seconds,
                bytes=manifest.bytes,
                path=checkpoint_path(self._folder, save.progress.iteration).name,
            )

    def _new_token(self) -> str:
        """Part of the names of what is being written: no share of an attempt that died is taken for one of this."""
        token: str = self._comm.broadcast_object(secrets.token_hex(4))
        return token
