"""The guard: ranks prove every few steps that they still hold the same parameters.

Ranks that are reduced correctly hold bitwise equal parameters, so one differing bit means that the reduction, the
broadcast at the start or the hardware failed. A run that goes on after that trains several different models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Box
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.settings import NOT_FINITE
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.stalls import reports

Checksums = NDArray[np.int64]

# What is compared beside the parameters.
_SETTINGS = "settings of the optimizers"

CAUSES = (
    "likely causes: gradients that were never reduced (an optimizer that ht.distribute did not return, those of "
    "torch.autograd.grad, Horovod's own DistributedOptimizer on Keras 3), a scheduler that looks at this rank's own "
    "loss (give ReduceLROnPlateau ht.mean(loss)), parameters changed on some ranks only, ranks that started from "
    "different weights, random numbers in updates that are not seeded alike on all ranks, a random layer seeded by "
    "rank inside the parameters, or faulty memory on one host"
)


@dataclass(frozen=True)
class _Replicas:
    """Parameters, or pieces of them, that several ranks hold; what one rank alone holds is not compared.

    Attributes:
        names: the names of what is compared, in the same order on every rank; pieces of one parameter have its name.
        groups: the indices of this rank's checksums that are compared by the ranks which hold them.
        indices: of each name, the index among this rank's checksums; -1 where this rank does not hold it.
    """

    names: Sequence[str]
    groups: Mapping[str, slice | list[int]]
    indices: NDArray[np.int64]

    def spread(self, own: Checksums) -> NDArray[np.int64]:
        """This rank's checksums and their complements, each at its place, of shape (2, names).

        After a maximum over the ranks either row is the complement of the other where the ranks agree: the maximum of
        x and of ~x (which is -x-1, without its overflow) tells maximum and minimum in one reduction.
        """
        # The lowest number, so that the maximum is that of the ranks which hold the piece.
        spread = np.full((2, len(self.names)), np.iinfo(np.int64).min)
        held = self.indices >= 0
        spread[:, held] = own[self.indices[held]], ~own[self.indices[held]]
        return spread


def _replicas_of_pieces(comm: Communicator, names: Sequence[str], boxes: Sequence[Box]) -> _Replicas:
    """The pieces that several ranks hold: elements of a parameter, in a box. Collective."""
    own = {piece: index for index, piece in enumerate(zip(names, boxes, strict=True))}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, pieces in enumerate(comm.allgather_object(list(own))):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    # Ordered by the lowest rank that holds a piece, and within it as in the model.
    compared = {piece: ranks for piece, ranks in holders.items() if len(ranks) > 1}
    groups: dict[str, list[int]] = {}
    for piece, ranks in compared.items():
        if piece in own:
            groups.setdefault(",".join(map(str, ranks)), []).append(own[piece])
    indices = np.array([own.get(piece, -1) for piece in compared], np.int64)
    return _Replicas([name for name, _ in compared], dict(groups), indices)


class Guard:
    """Compares the parameters of all ranks after the first step, after every ``every`` steps, and at the end.

    Args:
        names: one name a parameter, in the same order on every rank.
        checksums: computes one 64-bit integer a parameter. It may run in any thread.
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
            self._replicas = _Replicas(self._names, {"all": slice(None)}, np.arange(len(names)))
        else:
            self._replicas = _replicas_of_pieces(comm, names, boxes)
        # A single rank has no other to differ from.
        nothing = np.empty(0, np.int64)
        self.checksums, self._version = (checksums, version) if comm.size > 1 else (lambda: nothing, lambda: None)
        self._not_finite, self._mentioned = not_finite, False
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
        """Count one finished step, and check if it is time. Raises TransientError where ranks differ."""
        self.updated()
        self.steps += 1
        run.times.step_done()
        if not self.apart and (self.steps == 1 or self.steps % self._every == 0):
            self.check()
            for event in run.times.slow_ranks(self._comm, self.steps) if self._comm.size > 1 else ():
                # What only tells of a run must not end it.
                with contextlib.suppress(HpctrainError, OSError):
                    if self._comm.rank == 0:
                        reports.slow(event)

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
        """Refuse to end with parameters that are not finite. A script may still restore them before that."""
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
        groups = self._replicas.groups
        return {group: xxhash.xxh3_128_hexdigest(own[indices].data) for group, indices in groups.items()}

    def _find_difference(self, step: int, own: Checksums, settings: int = 0) -> TransientError | None:
        self._checked = step
        if self._comm.size == 1:
            return None
        spread = np.column_stack([self._replicas.spread(own), [settings, ~settings]])
        high, inverted_low = self._comm.allreduce(spread, "max")
        differing = np.flatnonzero(high != ~inverted_low)
        if not differing.size:
            return None
        names, place = [*self._replicas.names, _SETTINGS], int(differing[0])
        if place == len(self._replicas.names):
            return self._difference(step, names[place], settings, "")
        index = int(self._replicas.indices[place])
        count = int((differing < len(self._replicas.names)).sum())
        how_many = f" ({count} of {len(self._replicas.names)} differ)"
        return self._difference(step, names[place], int(own[index]) if index >= 0 else None, how_many)

    def _difference(self, step: int, name: str, checksum: int | None, how_many: str) -> TransientError:
        """Describe which ranks differ in the first parameter that differs; the majority is taken to be right."""
        everyone = self._comm.allgather_object((self._comm.host, checksum))
        hosts = [host for host, _ in everyone]
        sides: dict[int, list[int]] = {}
        for rank, (_, value) in enumerate(everyone):
            if value is not None:  # a rank that holds the parameter
                sides.setdefault(value, []).append(rank)
        *minorities, majority = sorted(sides.values(), key=len)
        odd = list[int]()
        if len(minorities[-1]) == len(majority):
            between = " and ".join(f"rank {_on(side, hosts)}" for side in sides.values())
            where = f"differs between {between}{how_many}, with no majority to tell which is right"
        else:
            odd = [rank for side in sides.values() if side is not majority for rank in side]
            where = f"differs on rank {_on(odd, hosts)} from the other ranks{how_many}"
        return TransientError(
            "HT-parameters-differ",
            "after step {step} the ranks hold different parameters: {name!r} {where}",
            CAUSES,
            exit_code=1,
            step=step,
            name=name,
            where=where,
            sides=list(sides.values()),
            odd=odd,
        )


def _on(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
