"""Moves and adds up the data of a group's ranks: through shared memory within a node, by MPI between nodes.

Three movements make all collectives: every rank gets the data of each (:meth:`Collectives.gather`); every rank gets a
part of its own from each (:meth:`Collectives.exchange`); every rank gets the sum of all parts for it
(:meth:`Collectives.reduce`). Within a node, ranks copy to shared memory what others read, in pieces that fit into
caches. Each byte travels to another node once, and a node sends the sum of its ranks instead of their terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.worker.comm.mpi_collectives import pieces
from hpctrain.worker.comm.process_group.reductions import Reduction
from hpctrain.worker.comm.process_group.staging import NodesOfRanks, StagingBuffers
from hpctrain.worker.comm.shared.kernels import cut
from hpctrain.worker.comm.shared.segments import LINE_BYTES, Pause
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# Up to this size it is faster if every rank adds up everything than if each adds up a part.
_AT_ONCE_BYTES = 16384
# Larger tensors are reduced piece by piece, so that a piece is still in a cache when the ranks read it.
_PIECE_BYTES = 16 << 20


class Collectives:
    """The movements. All ranks of the group call the same ones, in the same order; ``comm`` is for nothing else."""

    def __init__(self, comm: MPI.Intracomm, places: NodesOfRanks, staging: StagingBuffers, timeout: Timeout) -> None:
        self._comm = comm
        self._places = places
        self._staging = staging
        self._timeout = timeout

    def begin(self, what: str, pause: Pause) -> None:
        """Begin a collective; for the arguments see :meth:`StagingBuffers.begin`."""
        self._staging.begin(what, pause)

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        self._staging.meet()
        if len(self._places.nodes) > 1:
            self._timeout.finish(self._comm.Ibarrier, self._staging.what, pause=self._staging.pause)

    def gather(self, own: torch.Tensor, targets: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> None:
        """Copy each rank's data, as bytes, to its target on every rank that has one for it.

        ``own`` may share memory with its target. ``sizes`` are the same on all ranks.
        """
        places = self._places
        ranks = [rank for rank, size in enumerate(sizes) if size]
        mine = targets[places.rank]
        if mine is not None and mine.data_ptr() != own.data_ptr():
            mine.copy_(own)
        if not ranks or places.size == 1:
            return
        held = places.holdings(ranks, places.node)
        longest = max(sizes)
        step = self._staging.step(places.most_held(ranks), longest)
        for start in range(0, longest, step):
            shown = self._staging.show()
            parts = {
                rank: shown[holder][slot * step :][: min(step, sizes[rank] - start)]
                for holder, ranks in enumerate(held)
                for slot, rank in enumerate(ranks)
                if sizes[rank] > start
            }
            if places.rank in parts:
                parts[places.rank].copy_(own[start : start + step])
            self._send_to_nodes({rank: parts[rank] for rank in held[places.index] if rank in parts})
            self._staging.meet()
            for rank, part in parts.items():
                target = targets[rank]
                if target is not None and rank != places.rank:
                    target[start : start + step].copy_(part)

    def _send_to_nodes(self, parts: dict[int, torch.Tensor]) -> None:
        """Send this rank's part to the other nodes, and receive the parts that it holds for its own node."""
        places = self._places
        own = parts.get(places.rank)
        others = [node for node in range(len(places.nodes)) if node != places.node]
        sends = [] if own is None else [(places.partner(places.rank, node), own) for node in others]
        self._swap(sends, [(rank, part) for rank, part in parts.items() if rank != places.rank])

    def exchange(
        self, outgoing: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor | None], longest: int
    ) -> None:
        """Send each rank its part as bytes, and receive one from each; None for nothing.

        ``longest`` is the longest part of any rank of this node, in bytes.
        """
        places = self._places
        own, mine = outgoing[places.rank], incoming[places.rank]
        if own is not None and mine is not None:
            mine.copy_(own)
        remote = [rank for rank in range(places.size) if places.node_of(rank) != places.node]
        sends = [(rank, part) for rank in remote if (part := outgoing[rank]) is not None]
        self._swap(sends, [(rank, part) for rank in remote if (part := incoming[rank]) is not None])
        slots = len(places.here) - 1
        if not slots or not longest:
            return
        step = self._staging.step(slots, longest)
        others = [(index, rank) for index, rank in enumerate(places.here) if index != places.index]
        for start in range(0, longest, step):
            shown = self._staging.show()
            for index, rank in others:
                if (part := outgoing[rank]) is not None:
                    _copy(shown[places.index][_slot(places.index, index) * step :], part[start : start + step])
            self._staging.meet()
            for index, rank in others:
                if (target := incoming[rank]) is not None:
                    piece = target[start : start + step]
                    piece.copy_(shown[index][_slot(index, places.index) * step :][: len(piece)])

    def longest(self, own: int) -> int:
        """The maximum of ``own`` over the ranks of this node."""
        shown = self._staging.show()
        shown[self._places.index][:8].view(torch.int64).fill_(own)
        self._staging.meet()
        return max(int(part[:8].view(torch.int64)) for part in shown)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction) -> None:
        """Write the reduction of all ranks' parts for this rank into ``out``, which may be this rank's own part.

        The parts have one dimension, and are equally long on all ranks.
        """
        places = self._places
        width = out.itemsize
        longest = max(map(len, parts)) * width
        slots = places.size - 1
        if not slots:
            reduction.into(out, [parts[0]])
            return
        if not longest:
            return
        step = self._staging.step(slots, longest) // width
        others = [rank for rank in range(places.size) if rank != places.rank]
        for start in range(0, longest // width, step):
            shown = [half.view(out.dtype) for half in self._staging.show()]
            for rank in others:
                _copy(shown[places.index][_slot(places.rank, rank) * step :], parts[rank][start : start + step])
            self._staging.meet()
            self._add_up(
                shown, [part[start : start + step] for part in parts], out[start : start + step], reduction, step
            )

    def _add_up(
        self,
        shown: list[torch.Tensor],
        parts: list[torch.Tensor],
        out: torch.Tensor,
        reduction: Reduction,
        step: int,
    ) -> None:
        """Reduce the parts that this node's ranks have shown, then the sums of the other nodes."""
        places = self._places

        def terms(rank: int) -> list[torch.Tensor]:
            """The parts of this node's ranks for a rank of the group."""
            return [
                parts[rank]
                if member == places.rank == rank
                else shown[index][_slot(member, rank) * step :][: len(parts[rank])]
                for index, member in enumerate(places.here)
            ]

        if len(places.nodes) == 1:
            if len(out):
                reduction.into(out, terms(places.rank))
            return
        sends = []
        for rank in range(places.size):
            if places.node_of(rank) != places.node and places.partner(rank, places.node) == places.rank:
                total = torch.empty(len(parts[rank]), dtype=reduction.within, device="cpu")
                reduction.into(total, terms(rank), last=False)
                sends.append((rank, total))
        totals = [torch.empty(len(out), dtype=reduction.within, device="cpu") for _ in places.nodes]
        reduction.into(totals[places.node], terms(places.rank), last=False)
        receives = [
            (places.partner(places.rank, node), total) for node, total in enumerate(totals) if node != places.node
        ]
        self._swap(
            [(rank, total.view(torch.uint8)) for rank, total in sends],
            [(rank, total.view(torch.uint8)) for rank, total in receives],
        )
        reduction.into(out, totals)

    def reduce_everywhere(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """Replace a tensor of one dimension by its reduction, with the same bits on all ranks."""
        places = self._places
        if not len(flat):
            return
        if flat.nbytes <= _AT_ONCE_BYTES:
            terms = flat.new_empty(places.size, len(flat))
            self.gather(flat.view(torch.uint8), list(terms.view(torch.uint8)), [flat.nbytes] * places.size)
            reduction.into(flat, list(terms))
            return
        for piece in flat.split(_PIECE_BYTES // flat.itemsize):
            parts = [piece[part] for part in cut(len(piece), places.size, LINE_BYTES // flat.itemsize)]
            self.reduce(parts, parts[places.rank], reduction)
            as_bytes = [part.view(torch.uint8) for part in parts]
            self.gather(as_bytes[places.rank], as_bytes, [len(part) for part in as_bytes])

    def _swap(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send bytes to ranks of other nodes, and receive from them."""
        if not sends and not receives:
            return
        from mpi4py import MPI

        requests = [self._comm.Irecv(piece, rank) for rank, part in receives for piece in pieces(part.numpy())]
        requests += [self._comm.Isend(piece, rank) for rank, part in sends for piece in pieces(part.numpy())]
        self._timeout.wait(
            lambda: MPI.Request.Testall(requests),
            self._staging.what,
            pause=self._staging.pause,
            keep=(requests, sends, receives),
        )


def _slot(owner: int, reader: int) -> int:
    """The slot in which a rank shows its part for another one; there is none for itself."""
    return reader if reader < owner else reader - 1


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target[: len(source)].copy_(source)
