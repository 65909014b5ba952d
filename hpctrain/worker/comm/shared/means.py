"""Two ways to compute a mean over all ranks, prepared once for each buffer and called in each step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.exchange import Exchange
from hpctrain.worker.comm.shared.kernels import Array, ThreadPool, add_up, blocks, cut, sum_type
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.segments import LINE_BYTES, Pause, Segment

# Computes the mean.
Mean = Callable[[Pause], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """A part of every rank's buffer in a segment.

    Attributes:
        wire: the type in which values travel between nodes.
        name: the same on every rank; used in messages.
    """

    segment: Segment
    start: int
    nbytes: int
    dtype: np.dtype[Any]
    wire: np.dtype[Any]
    name: str

    def __str__(self) -> str:
        wire = f", {self.wire} between nodes" if self.wire != self.dtype else ""
        return f"{self.name!r} ({self.nbytes} bytes of {self.dtype}{wire})"

    def own(self) -> Array:
        """This rank's buffer."""
        return self.segment.own[self.start : self.start + self.nbytes].view(self.dtype)

    def all_local(self) -> list[Array]:
        """The buffers of all local ranks."""
        return [view[self.start : self.start + self.nbytes].view(self.dtype) for view in self.segment.views]


def mean_at_once(buffer: Buffer, slots: Segment, ranks: int, known: dict[int, str]) -> Mean:
    """For small buffers on one node: every rank copies its buffer into a slot, and adds all of them up itself.

    One barrier is enough, because each rank has two slots: a rank that overwrites a slot has passed the barrier of the
    other one, at which all ranks had read this one.

    Args:
        slots: the segment with the slots, shared by all small buffers.
        ranks: the number of ranks on all nodes.
        known: the descriptions of all such buffers by identity, for messages; this buffer is added.
    """
    own = buffer.own()
    factor = np.array(1 / ranks, dtype=sum_type(buffer.dtype))
    half = len(slots.own) // 2
    turns = []
    for start in (0, half):
        terms = [view[start : start + buffer.nbytes].view(buffer.dtype) for view in slots.views]
        turns.append((slots.own.data[start : start + buffer.nbytes], terms))
    # Assigning memoryviews is the fastest way to copy a few bytes.
    source = own.view(np.uint8).data
    name, barrier = buffer.name, slots.barrier
    halves = [(terms[slots.index], terms[0], terms[-1]) for _, terms in turns]
    # All small buffers share the slots, so each rank marks which buffer it put there.
    identity = zlib.crc32(str(buffer).encode())
    own_marks, others = slots.marks[slots.index], [m for rank, m in enumerate(slots.marks) if rank != slots.index]
    other = others[0] if others else own_marks
    known[identity] = str(buffer)

    def differ(theirs: int) -> HpctrainError:
        return HpctrainError(
            "HT-ranks-reduce-differently",
            "a rank reduces {other} where another reduces {buffer}",
            "make the same calls of backward(), in the same order, on every rank",
            exit_code=1,
            other=known.get(theirs, "something else"),
            buffer=buffer,
        )

    def mean(pause: Pause) -> None:
        turn = slots.barriers & 1
        slot, terms = turns[turn]
        slot[:] = source
        own_marks[turn] = identity
        barrier(name, pause)
        for marks in others:
            if marks[turn] != identity:
                raise differ(marks[turn])
        add_up(own, terms, factor)

    def mean_of_two(pause: Pause) -> None:
        # mean() with as few calls as possible. Halving is exact, so it may come before the sum.
        turn = slots.barriers & 1
        slot, first, second = halves[turn]
        np.multiply(own, factor, slot)
        own_marks[turn] = identity
        barrier(name, pause)
        if other[turn] != identity:
            raise differ(other[turn])
        np.add(first, second, own)

    return mean_of_two if len(slots.views) == 2 and own.itemsize > 2 else mean


def mean_by_slices(buffer: Buffer, node: LocalNode, exchange: Exchange | None, threads: ThreadPool, ranks: int) -> Mean:
    """Each rank adds up its slice of all local buffers in the first of them, and copies the result to the others.

    ``exchange`` sums slices over the nodes; None for a rank that does not take part in that.
    """
    align = LINE_BYTES // buffer.dtype.itemsize
    everyone = buffer.all_local()
    lane = cut(len(everyone[0]), node.lanes, align)[node.lane]
    share = cut(lane.stop - lane.start, node.sharers, align)[node.turn]
    shares = blocks([array[lane][share] for array in everyone])
    factor = np.array(1 / ranks, dtype=sum_type(buffer.dtype))

    def add(block: list[Array]) -> None:
        add_up(block[0], block, factor)

    def spread(block: list[Array]) -> None:
        for other in block[1:]:
            np.copyto(other, block[0])

    def add_and_spread(block: list[Array]) -> None:
        add(block)
        spread(block)

    barrier = functools.partial(buffer.segment.barrier, buffer.name)
    transfer = exchange.prepare(everyone[0][lane], buffer.wire, buffer.name) if exchange else None
    # Several ranks of this node add up parts of what one of them transfers.
    lanes_shared = node.lanes < node.comm.size

    def mean(pause: Pause) -> None:
        barrier(pause)
        if node.count == 1:
            threads.each(add_and_spread, shares)
        else:
            threads.each(add, shares)
            if lanes_shared:
                barrier(pause)
            if transfer:
                transfer(pause)
            if lanes_shared:
                barrier(pause)
            threads.each(spread, shares)
        barrier(pause)

    return mean
