"""The guard: ranks prove now and then that they still hold the same parameters.

Ranks that are reduced correctly hold bitwise equal parameters, so one differing bit means that the reduction, the
broadcast at the start or the hardware failed. A run that goes on after that trains several different models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.base import Communicator
from hpctrain.errors import TransientError

Checksums = NDArray[np.int64]
Values = NDArray[Any]

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
        checksums: computes one 64-bit integer a parameter, in the order of ``names``; in any thread.
        values: a parameter by its place in ``names``.
        every: steps between two checks.

    Attributes:
        checksums: as given, for :meth:`compare`; of one rank they are of nothing.
        steps: finished ones that were counted; whoever restores a training sets it.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        checksums: Callable[[], Checksums],
        values: Callable[[int], Values],
        *,
        every: int,
    ) -> None:
        self._comm = comm
        self._names = list(names)
        # One rank has nobody to differ from.
        self.checksums = checksums if comm.size > 1 else _nothing
        self._values = values
        self._every = every
        self.steps = 0

    def step_done(self) -> None:
        """Count one finished step, and check if it is time.

        Raises:
            TransientError: ranks differ; names the first parameter and its first element, the ranks and their hosts.
                Exit code 1.
        """
        self.steps += 1
        if self.steps == 1 or self.steps % self._every == 0:
            self.check()

    def restart(self) -> None:
        """Count from 0 again, on all ranks: a step that failed may have counted on some of them only."""
        self.steps = 0

    def check(self) -> None:
        """Compare now."""
        self.compare(self.steps, self.checksums())

    def compare(self, step: int, own: Checksums) -> None:
        """Compare checksums that were computed elsewhere, after ``step`` steps: one reduction of two integers each."""
        # The maximum of x and of ~x (which is -x-1, without its overflow) tells maximum and minimum in one reduction.
        high, inverted_low = self._comm.allreduce(np.stack([own, ~own]), "max")
        differing = np.flatnonzero(high != ~inverted_low)
        if differing.size:
            raise self._difference(step, int(differing[0]), int(differing.size), int(own[differing[0]]))

    def _difference(self, step: int, index: int, count: int, own: int) -> TransientError:
        """Who holds what of the first parameter that differs; a majority is taken for right."""
        ranks = self._comm.allgather_object((own, self._comm.host))
        sides: dict[int, list[str]] = {}
        for rank, (value, host) in enumerate(ranks):
            sides.setdefault(value, []).append(f"{rank} ({host})")
        *few, most = sorted(sides.values(), key=len)
        differ = f"({count} of {len(self._names)} parameters differ)"
        if len(few[-1]) == len(most):
            between = " and ".join(f"rank {', '.join(side)}" for side in sides.values())
            what = f"differs between {between} {differ}, with no majority to tell who is right"
        else:
            odd = ", ".join(rank for side in sides.values() if side is not most for rank in side)
            what = f"differs on rank {odd} from the other ranks {differ}"
        return TransientError(
            f"after step {step} the ranks hold different parameters: {self._names[index]!r} {what}; "
            f"{self._first_element(index)}",
            CAUSES,
            exit_code=1,
        )

    def _first_element(self, index: int) -> str:
        """Where a parameter first differs, and what the ranks have there. Collective, with few bytes."""
        values = self._values(index)
        flat = np.ascontiguousarray(values).reshape(-1)
        size = math.isqrt(len(flat)) + 1
        blocks = [flat[start : start + size] for start in range(0, len(flat), size)]
        sums = np.array(self._comm.allgather_object([zlib.crc32(block.tobytes()) for block in blocks]))
        block = _first_odd(sums)
        everyone = np.stack(self._comm.allgather_object(blocks[block]))
        words = everyone.view(f"u{everyone.itemsize}")
        column = _first_odd(words)
        held: dict[int, str] = {}
        for rank, (value, word) in enumerate(zip(everyone[:, column], words[:, column], strict=True)):
            held.setdefault(int(word), f"{value!s} (bits {word:0{2 * word.itemsize}x}) on rank {rank}")
        place = [int(each) for each in np.unravel_index(block * size + column, values.shape)]
        return f"its element {place} is {', '.join(held.values())}"


def _nothing() -> Checksums:
    return np.empty(0, np.int64)


def _first_odd(rows: NDArray[Any]) -> int:
    """The first column in which a row differs from the first."""
    return int(np.flatnonzero((rows != rows[0]).any(axis=0))[0])
