"""Writing and reading checkpoints on all ranks of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.checkpoints import Progress, checkpoint_path, read_checkpoint, write_checkpoint
from hpctrain.comm import Communicator
from hpctrain.errors import HpctrainError
from hpctrain.events import EventWriter

State = dict[str, NDArray[Any]]

# What a layer computes from a rank's own samples, as batch normalisation its running statistics: beside rank 0's, which
# are in the model's state for ranks that have none.
STATISTICS = "statistics."
# What is a rank's own. Of everything else rank 0's is written and restored on all ranks: it is the same on all of them
# but for what a layer draws from a random state that is a variable of the model, as a dropout of Keras.
OWN = ("random.", STATISTICS)


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
        everyone = self._comm.allgather_object({name: state.pop(name) for name in list(state) if name.startswith(OWN)})
        if self._comm.rank == 0:
            own = {f"{name}.{rank}": value for rank, values in enumerate(everyone) for name, value in values.items()}
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
        state = {name: value for name, value in saved.items() if not name.startswith(OWN)}
        # Other ranks draw other random numbers anyway.
        if progress.ranks == self._comm.size:
            end = f".{self._comm.rank}"
            own = {name: value for name, value in saved.items() if name.startswith(OWN) and name.endswith(end)}
            state.update({name.removesuffix(end): value for name, value in own.items()})
        try:
            training.restore(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise HpctrainError(f"{path} is of another model or optimizer: {error}", exit_code=1) from error
        return progress
