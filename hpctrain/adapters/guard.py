"""The guard: ranks prove now and then that they still hold the same parameters.

Ranks that are reduced correctly hold bitwise equal parameters, so one differing bit means that the reduction, the
broadcast at the start or the hardware failed. A run that goes on after that trains several different models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.base import Communicator
from hpctrain.errors import HpctrainError

Checksums = NDArray[np.int64]

CAUSES = (
    "likely causes: gradients that were never reduced (an optimizer that ht.distribute did not return, Horovod's own "
    "DistributedOptimizer on Keras 3), parameters changed on some ranks only, ranks that started from different "
    "weights, a random layer seeded by rank inside the parameters, or faulty memory on one host"
)


class Guard:
    """Compares the parameters of all ranks after the first step and after every ``every`` steps.

    Args:
        comm: the ranks.
        names: one name a parameter, in the same order on every rank.
        checksums: computes one 64-bit integer a parameter, in the order of ``names``.
        every: steps between two checks.
    """

    def __init__(
        self, comm: Communicator, names: Sequence[str], checksums: Callable[[], Checksums], *, every: int
    ) -> None:
        self._comm = comm
        self._names = list(names)
        self._checksums = checksums
        self._every = every
        self._steps = 0

    def step_done(self) -> None:
        """Count one finished step, and check if it is time.

        Raises:
            HpctrainError: ranks differ; names the first parameter, the ranks and their hosts. Exit code 1.
        """
        self._steps += 1
        if self._steps == 1 or self._steps % self._every == 0:
            self.check()

    def restart(self) -> None:
        """Count from 0 again, on all ranks: a step that failed may have counted on some of them only."""
        self._steps = 0

    def check(self) -> None:
        """Compare now."""
        if self._comm.size > 1:
            self.compare(self._steps, self._checksums())

    def compare(self, step: int, own: Checksums) -> None:
        """Compare checksums that were computed elsewhere, after ``step`` steps: one reduction of two integers each."""
        # The maximum of x and of ~x (which is -x-1, without its overflow) tells maximum and minimum in one reduction.
        high, inverted_low = self._comm.allreduce(np.stack([own, ~own]), "max")
        differing = np.flatnonzero(high != ~inverted_low)
        if differing.size:
            raise self._difference(step, int(differing[0]), int(differing.size), int(own[differing[0]]))

    def _difference(self, step: int, index: int, count: int, own: int) -> HpctrainError:
        """Who holds what of the first parameter that differs; the majority is taken for right."""
        ranks = self._comm.allgather_object((own, self._comm.host))
        values = [value for value, _ in ranks]
        majority = max(values, key=values.count)
        odd = [f"{rank} ({host})" for rank, (value, host) in enumerate(ranks) if value != majority]
        return HpctrainError(
            f"after step {step} the ranks hold different parameters: {self._names[index]!r} differs on "
            f"rank {', '.join(odd)} from the other ranks ({count} of {len(self._names)} parameters differ)",
            CAUSES,
            exit_code=1,
        )
