"""The guard: ranks prove every few steps that they still hold the same parameters.

Ranks that are reduced correctly hold bitwise equal parameters, so one differing bit means that the reduction, the
broadcast at the start or the hardware failed. A run that goes on after that trains several different models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Box
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.settings import NOT_FINITE
from hpctrain.worker.adapters.replicas import Checksums, Replicas, ReplicasOfPieces
from hpctrain.worker.comm.base import Communicator

Values = NDArray[Any]
T = TypeVar("T")

CAUSES = (
    "likely causes: gradients that were never reduced (an optimizer that ht.distribute did not return, those of "
    "torch.autograd.grad, Horovod's own DistributedOptimizer on Keras 3), a scheduler that looks at this rank's own "
    "loss (give ReduceLROnPlateau ht.mean(loss)), parameters changed on some ranks only, ranks that started from "
    "different weights, random numbers in updates that are not seeded alike on all ranks, a random layer seeded by "
    "rank inside the parameters, or faulty memory on one host"
)
_SETTINGS_CAUSES = (
    "likely causes: a scheduler that looks at this rank's own loss (give ReduceLROnPlateau ht.mean(loss)), or that "
    "makes steps on some ranks only"
)


class Guard:
    """Compares the parameters of all ranks after the first step, after every ``every`` steps, and at the end.

    Args:
        names: one name a parameter, in the same order on every rank.
        checksums: computes one 64-bit integer a parameter, in the order of ``names``. It may run in any thread.
        values: returns a parameter by its place in ``names``.
        version: returns a value that changes when somebody writes to the parameters, as far as that can be known. It
            has to be cheap, because each step calls it.
        not_finite: gives the name of a parameter with numbers that are NaN or infinite; "" if there is none.
        every: steps between two comparisons.
        boxes: where parameters are divided over ranks, the elements that this rank holds of each of its ``names``. Only
            pieces that several ranks hold are compared. Collective then.

    Attributes:
        checksums: what was given, for :meth:`compare`; on a single rank it returns an empty array.
        steps: how many finished steps were counted. Restoring a training sets it.
        apart: the ranks hold different parameters by intent, until :meth:`averaged`: nothing is compared.
        settings: returns the optimizers' numbers (learning rate, momentum, ...) by name; they are compared too.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        checksums: Callable[[], Checksums],
        values: Callable[[int], Values],
        *,
        every: int,
        version: Callable[[], object] = lambda: None,
        not_finite: Callable[[], str] = lambda: "",
        boxes: Sequence[Box] | None = None,
    ) -> None:
        if every < 1:
            raise HpctrainError("HT-argument-not-valid", "guard_every={every} must be above 0", every=every)
        self._comm = comm
        self._names = list(names)
        if boxes is None or comm.size == 1:
            self._replicas = Replicas(names)
        else:
            self._replicas = ReplicasOfPieces(comm, names, boxes)
        # A single rank has no other to differ from.
        self.checksums, self._version = (checksums, version) if comm.size > 1 else (_nothing, lambda: None)
        self._values, self._not_finite, self._mentioned = values, not_finite, False
        self._every = every
        self._trained_version = self._version()
        self._sealed = False
        self.steps = 0
        self.apart = False
        self.settings: Callable[[], Mapping[str, object]] = dict
        self._checked = 0
        comm.distributed = True
        if comm.size > 1:
            comm.add_last_check(self.check_last)
            comm.add_last_check(self.require_finite)

    def step_done(self) -> None:
        """Count one finished step, and check if it is time.

        Raises:
            TransientError: ranks differ; names the first parameter and its first element, the ranks and their hosts.
                Exit code 1.
        """
        self.updated()
        self.steps += 1
        if not self.apart and (self.steps == 1 or self.steps % self._every == 0):
            self.check()

    def averaged(self) -> None:
        """Accept parameters that ranks trained apart and have averaged, and check if it is time. Collective then."""
        self.apart = False
        self.updated()
        if not self._checked or self.steps - self._checked >= self._every:
            # The settings are left out, because ranks that train by themselves may use different ones.
            self.compare(self.steps, self.checksums())

    def updated(self) -> None:
        """Accept the current parameters as the result of training, on all ranks alike."""
        self._trained_version = self._version()

    def check_last(self) -> None:
        """Compare once more if steps were done since the last comparison: at the end of a run or of a part. Collective.

        A difference is an error only if training made it. What a script wrote to the parameters after the last step,
        as rank 0 may before it saves them, can hide whether they were equal: a message says so then.
        """
        written = self._version() != self._trained_version
        # Without a step, what was written may be updates by hand.
        unchecked = self.steps != self._checked or (written and not self.steps)
        own = [self.steps, -self.steps, unchecked, written, self._sealed]
        steps, inverted_least, unchecked, written, sealed = self._comm.allreduce(np.array(own), "max")
        # What was dropped before the first step has left no checksums.
        if not unchecked or (sealed and not steps):
            return
        error = self._find_difference(self.steps, self.checksums())
        if error is None:
            return
        if not steps:
            self._comm.say(
                "at the end the ranks hold different parameters, and no optimizer has updated them: if they were "
                "trained by hand, it was by gradients of each rank's own samples, and the results are rank 0's alone"
            )
            return
        # The parameters of a model that was dropped may have been collected on some ranks before the last steps.
        if not written and not (sealed and steps != -inverted_least):
            raise error
        self._comm.say(
            f"not verified that the ranks held equal parameters after step {steps}: the script has since changed or "
            "dropped them, not in the same way on all ranks"
        )

    def require_finite(self) -> None:
        """Refuse to end with parameters that are not finite. A script may still restore them before that.

        Raises:
            HpctrainError: a parameter is not finite.
        """
        if self.steps and not NOT_FINITE.read() and (name := self._not_finite()):
            raise HpctrainError(
                "HT-parameters-not-finite",
                "after step {step} parameter {name!r} has numbers that are NaN or infinite",
                "a lower learning rate, or gradients that are clipped, may keep them finite; "
                f"{NOT_FINITE.name}=1 hpctrain run … accepts them",
                exit_code=1,
                step=self.steps,
                name=name,
            )

    def release(self) -> None:
        """Release the parameters, and keep the checksums that :meth:`check_last` compares."""
        name = self._not_finite()
        self._not_finite = lambda: name
        # Before the first step there is nothing to prove.
        own = self.checksums() if self.steps else np.zeros(len(self._names), np.int64)
        self.checksums = lambda: own
        self._values = lambda index: np.empty(0)
        settings = self.settings()
        self.settings = lambda: settings
        version, self._sealed = self._version(), True
        self._version = lambda: version
        self._comm.keep(self)

    def succeed(self, other: Guard) -> None:
        """Take the place of another guard, and go on counting its steps."""
        self.steps, self._checked, self.apart, self.settings = other.steps, other._checked, other.apart, other.settings

    def restart(self) -> None:
        """Count steps from 0 again, on all ranks: a step that failed may have been counted on only some of them."""
        self.steps = self._checked = 0

    def check(self) -> None:
        """Compare the parameters and the settings now, and say once that numbers are not finite."""
        if not self._mentioned and (name := self._not_finite()):
            self._mentioned = True
            self._comm.say(f"after step {self.steps} parameter {name!r} has numbers that are NaN or infinite")
        text = repr(sorted(self.settings().items())) if self._comm.size > 1 else ""
        if error := self._find_difference(
            self.steps, self.checksums(), xxhash.xxh3_64_intdigest(text.encode()) - (1 << 63)
        ):
            raise error

    def compare(self, step: int, own: Checksums) -> None:
        """Compare checksums that were computed elsewhere after ``step`` steps. Reduces two integers for each."""
        if error := self._find_difference(step, own):
            raise error

    def proofs(self, own: Checksums) -> dict[str, str]:
        """One hash for each group of ranks that hold the same elements, by a name that the group alone has.

        It is equal on the ranks of a group if their checksums are, and needs no message between them.
        """
        return self._replicas.proofs(own)

    def _find_difference(self, step: int, own: Checksums, settings: int = 0) -> TransientError | None:
        self._checked = step
        if self._comm.size == 1:
            return None
        spread = np.column_stack([self._replicas.spread(own), [settings, ~settings]])
        high, inverted_low = self._comm.allreduce(spread, "max")
        differing = np.flatnonzero(high != ~inverted_low)
        if not differing.size:
            return None
        if differing[0] < len(self._replicas.names):
            return self._difference(step, differing[differing < len(self._replicas.names)], own)
        return TransientError(
            "HT-optimizer-settings-differ",
            "after step {step} the ranks' optimizers have different settings: {settings}",
            _SETTINGS_CAUSES,
            exit_code=1,
            step=step,
            settings=self._different_settings(),
        )

    def _different_settings(self) -> str:
        """The first setting that differs between ranks; empty where none does. Collective."""
        everyone = self._comm.allgather_object(dict(self.settings()))
        for name in dict.fromkeys(name for each in everyone for name in each):
            held: dict[str, list[str]] = {}
            for rank, each in enumerate(everyone):
                held.setdefault(repr(each.get(name)), []).append(str(rank))
            if len(held) > 1:
                return f"{name} is {', '.join(f'{value} on rank {_ranks(ranks)}' for value, ranks in held.items())}"
        return ""

    def _difference(self, step: int, differing: NDArray[np.int64], checksums: Checksums) -> TransientError:
        """Describe which ranks differ in the first parameter that differs; the majority is taken to be right."""
        names, place = self._replicas.names, int(differing[0])
        index = self._replicas.index(place)
        hosts = self._comm.allgather_object(self._comm.host)
        sides: dict[int, list[int]] = {}
        for rank, value in self._of_holders(None if index is None else int(checksums[index])):
            sides.setdefault(value, []).append(rank)
        *minorities, majority = sorted(sides.values(), key=len)
        differ, odd = f"({len(differing)} of {len(names)} {self._replicas.what} differ)", list[int]()
        if len(minorities[-1]) == len(majority):
            between = " and ".join(f"rank {_on(side, hosts)}" for side in sides.values())
            where = f"differs between {between} {differ}, with no majority to tell which is right"
        else:
            odd = [rank for side in sides.values() if side is not majority for rank in side]
            where = f"differs on rank {_on(odd, hosts)} from the other ranks {differ}"
        element, held = self._first_element(place)
        words = f"its element {element} is {', '.join(held)}" if held else "the model no longer exists"
        settings = self._different_settings()
        return TransientError(
            "HT-parameters-differ",
            "after step {step} the ranks hold different parameters: {name!r} {where}; {words}",
            CAUSES,
            exit_code=1,
            step=step,
            name=names[place],
            where=where,
            words=f"{words}; of the optimizers, {settings}" if settings else words,
            count=len(differing),
            sides=list(sides.values()),
            odd=odd,
            element=element,
            held=held,
            settings=settings,
        )

    def _of_holders(self, value: T | None) -> list[tuple[int, T]]:
        """The values of the ranks that have one, each with its rank. Collective."""
        return [(rank, each) for rank, each in enumerate(self._comm.allgather_object(value)) if each is not None]

    def _first_element(self, place: int) -> tuple[list[int], list[str]]:
        """Where a parameter first differs, and what the ranks have there: nothing where it is gone.

        Collective, with few bytes.
        """
        index = self._replicas.index(place)
        values = None if index is None else np.ascontiguousarray(self._values(index))
        shapes = [shape for _, shape in self._of_holders(None if values is None else values.shape)]
        if not min(map(math.prod, shapes)):
            return [], []
        size = math.isqrt(math.prod(shapes[0])) + 1
        flat = None if values is None else values.reshape(-1)
        blocks = None if flat is None else [flat[start : start + size] for start in range(0, len(flat), size)]
        sums = self._of_holders(None if blocks is None else [zlib.crc32(block.tobytes()) for block in blocks])
        block = _first_odd(np.array([each for _, each in sums]))
        ranks, rows = zip(*self._of_holders(None if blocks is None else blocks[block]), strict=True)
        everyone = np.stack(rows)
        words = everyone.view(f"u{everyone.itemsize}")
        column = _first_odd(words)
        held: dict[int, str] = {}
        for rank, value, word in zip(ranks, everyone[:, column], words[:, column], strict=True):
            held.setdefault(int(word), f"{value!s} (bits {word:0{2 * word.itemsize}x}) on rank {rank}")
        found = np.array(np.unravel_index(block * size + column, shapes[0]), np.int64)
        begin = self._replicas.offsets(place) or (0,) * len(found)
        return [int(each) for each in found + begin], list(held.values())


def _on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)


def _ranks(ranks: Sequence[str]) -> str:
    """The first few of many."""
    return ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _nothing() -> Checksums:
    return np.empty(0, np.int64)


def _first_odd(rows: NDArray[Any]) -> int:
    """The first column in which a row differs from the first."""
    return int(np.flatnonzero((rows != rows[0]).any(axis=0))[0])
