"""Keeps the order in which several models' gradients are reduced the same on every rank.

Engines reduce what ranks submit in the order in which they submit it. Within one model that order is fixed; between
models it is the script's. So where a process has several, the ranks agree at the first gradient of each model's
backward pass on which model it is: one small all-reduce, on connections of its own.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.base import Communicator, Group

if TYPE_CHECKING:
    from hpctrain.worker.adapters.torch.reducer import GradientReducer

_PURPOSE = "agreeing on the model of a backward pass"


class ModelOrder:
    """The order in which the models of one communicator are reduced.

    Attributes:
        lock: held while a gradient is put into its bucket.
    """

    def __init__(self, comm: Communicator) -> None:
        self._rank, self.size = comm.rank, comm.size
        self.lock = threading.RLock()
        self._entered = 0
        # Weak, because a script may distribute any number of models one after another.
        self._living: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()
        # In which the ranks agree; None where a process has one model.
        self._group: Group | None = None
        # The models that this backward pass has reached and that have not started all their reductions, in that order.
        # A model whose backward pass failed stays here as long as it lives.
        self._begun: list[weakref.ref[GradientReducer]] = []

    def enter(self, comm: Communicator, reducer: GradientReducer) -> int:
        """Add a reducer to the order; returns its number. Collective."""
        number = self._entered
        self._entered += 1
        self._living[number] = reducer
        if self._entered > 1 and self.size > 1:
            self._group = comm.kept_group(_PURPOSE)
        return number

    def renew(self, comm: Communicator) -> None:
        """Start over with the remaining ranks after :meth:`Communicator.recover`. Collective."""
        self._rank, self.size = comm.rank, comm.size
        self._begun.clear()
        if self._group is not None:
            self._group = comm.kept_group(_PURPOSE)

    def begin(self, reducer: GradientReducer) -> None:
        """Record that a backward pass has reached a model."""
        if self._group is None:
            return
        self._begun = [each for each in self._begun if each() is not None]
        self._begun.append(weakref.ref(reducer))
        if len(self._begun) == 1:
            self._agree(reducer)

    def has(self, reducer: GradientReducer) -> bool:
        """Whether it is this reducer's turn to start reductions."""
        return self._group is None or (bool(self._begun) and self._begun[0]() is reducer)

    def done(self, reducer: GradientReducer) -> None:
        """Record that a reducer has started all its reductions, and let the next one start."""
        if self._group is None or not self.has(reducer):
            return
        del self._begun[0]
        following = self._begun[0]() if self._begun else None
        if following is not None:
            self._agree(following)
            following.launch_ready()

    def _agree(self, reducer: GradientReducer) -> None:
        """Make sure that it is the turn of the same model on all ranks. Collective."""
        assert self._group is not None
        numbers = np.zeros(self.size, dtype=np.int64)
        numbers[self._rank] = reducer.number
        try:
            everyone: NDArray[np.int64] = self._group.allreduce(numbers)
            if (everyone != reducer.number).any():
                raise self._differ(everyone)
        except BaseException:
            self._begun.clear()
            raise

    def _differ(self, everyone: NDArray[np.int64]) -> HpctrainError:
        sides = []
        for number in np.unique(everyone).tolist():
            # Another rank may still have a model that was dropped here.
            reducer = self._living.get(number)
            name = f"model {number + 1}" + (f" ({reducer.title})" if reducer else "")
            sides.append(f"{name} on rank {', '.join(map(str, np.flatnonzero(everyone == number)[:8]))}")
        return HpctrainError(
            "HT-ranks-reduce-differently",
            "the ranks' backward passes reach different models at the same time: {models}",
            "call backward() for the models in the same order, and as often, on every rank; a branch that only some "
            "ranks take must not decide which model is trained",
            exit_code=1,
            models=" but ".join(sides),
        )


def model_order(comm: Communicator) -> ModelOrder:
    """The order of the models of a communicator."""
    return comm.part("model order", lambda: ModelOrder(comm))
