"""Writing and reading checkpoints on all ranks of a run."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.checkpoints import Progress, checkpoint_path, read_checkpoint, write_checkpoint
from hpctrain.comm import Communicator
from hpctrain.errors import HpctrainError
from hpctrain.events import EventWriter

State = dict[str, NDArray[Any]]

# What a layer computes from a rank's own samples, as batch normalisation its running statistics.
STATISTICS = "statistics."
# What is a rank's own. Of everything else rank 0's is written and restored on all ranks: it is the same on all of them
# but for what a layer draws from a random state that is a variable of the model, as a dropout of Keras.
OWN = ("random.", STATISTICS)
# Behind the name of what is a rank's own in a checkpoint: whose it is.
_WHOSE = re.compile(r"\.(all|\d+)$")


class Stateful(Protocol):
    """What has a state."""

    def state(self) -> State:
        """All that decides the bits of what follows, by name; what begins as :data:`OWN` says is this rank's own."""

    def restore(self, state: State) -> None:
        """Go on from a state; what is a rank's own may be missing."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: for all of them; a file system that every rank sees.
        comm: the ranks.
        events: where rank 0 records them.
    """

    def __init__(self, folder: Path, comm: Communicator, events: EventWriter) -> None:
        self._folder = folder
        self._comm = comm
        self._events = events

    def save(self, progress: Progress, training: Stateful) -> None:
        """Write a checkpoint; returns on every rank when it is on disk. Collective."""
        begin = time.perf_counter()
        state = training.state()
        own = self._everyones({name: state.pop(name) for name in list(state) if name.startswith(OWN)})
        if self._comm.rank == 0:
            write_checkpoint(self._folder, progress, {**state, **own})
        self._comm.agree()
        self._events.emit(
            "checkpoint",
            iteration=progress.iteration,
            epoch=progress.epoch,
            seconds=time.perf_counter() - begin,
            path=checkpoint_path(self._folder, progress.iteration).name,
        )

    def restore(self, iteration: int, training: Stateful) -> Progress:
        """Go on from the checkpoint of an iteration; the number of ranks may be another than then.

        Raises:
            HpctrainError: it cannot be read, or is of another model or optimizer.
        """
        path = checkpoint_path(self._folder, iteration)
        progress, saved = read_checkpoint(path)
        # Other ranks than those that were: all take rank 0's.
        rank = self._comm.rank if progress.ranks == self._comm.size else 0
        state = {}
        for name, value in saved.items():
            whose = _WHOSE.search(name) if name.startswith(OWN) else None
            if whose is None or whose[1] in ("all", str(rank)):
                state[name[: whose.start()] if whose else name] = value
        try:
            training.restore(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise HpctrainError(f"{path} is of another model or optimizer: {error}", exit_code=1) from error
        return progress

    def _everyones(self, own: State) -> State:
        """What ranks have of their own, once where it is the same on all, as statistics are at the end of an epoch."""
        digests = self._comm.allgather_object(
            {name: hashlib.blake2b(value.tobytes()).digest() for name, value in own.items()}
        )
        same = {name for name, digest in digests[0].items() if all(each.get(name) == digest for each in digests)}
        everyone = self._comm.allgather_object({name: value for name, value in own.items() if name not in same})
        state = {f"{name}.all": own[name] for name in same}
        return state | {f"{name}.{rank}": v for rank, values in enumerate(everyone) for name, v in values.items()}
