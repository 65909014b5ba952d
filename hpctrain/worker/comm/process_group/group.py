"""The process group itself: torch.distributed's hooks, each of which checks its tensors and starts a collective.

Names and order of the parameters are torch's (torch/csrc/distributed/c10d/ProcessGroup.hpp of 2.13): functional
collectives, and with them DTensor, come from C++, the others from ``torch.distributed``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.process_group.collectives import Collectives
from hpctrain.worker.comm.process_group.messages import (
    Messages,
    MessageWork,
    as_bytes,
    destroyed_error,
    flat,
    give_back,
)
from hpctrain.worker.comm.process_group.reductions import Reduction
from hpctrain.worker.comm.process_group.staging import NodesOfRanks, StagingBuffers
from hpctrain.worker.comm.process_group.work import Body, CollectiveWork
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.worker import Worker, no_pause, sleep, threads_may_call_mpi
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

NAME = "hpctrain"
_FORMING, _LEAVING = "forming a process group", "destroying a process group"
_Lists = Sequence[Sequence[torch.Tensor]]
_Tensors = Sequence[torch.Tensor]
_Parts = Sequence[torch.Tensor | None]


class HpctrainGroup(dist.ProcessGroup):
    """A process group of torch.distributed over MPI and each node's shared memory, for tensors in the CPU's memory.

    Collectives of a group run in the order of the calls, which has to be the same on all of its ranks. Different
    groups, and messages, do not wait for each other. A collective that its caller waits for runs in the caller's
    thread. Results are the same bits on all ranks and from run to run. Making a group is collective over its ranks.

    Args:
        comm: the ranks of the group, which frees it.
        crowded: whether there are more ranks than cores, so that a waiting rank has to yield its core.

    Attributes:
        moved: how many bytes all groups of this rank have moved in collectives and messages.
    """

    moved = 0

    def __init__(self, comm: MPI.Intracomm, timeout: Timeout, *, crowded: bool) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._size = comm.size
        self._name = self._description = ""
        self._timeout = timeout
        self._comm = comm
        with timeout.blocking(_FORMING):
            self._message_comm = comm.Dup()
            self._node = LocalNode(comm)
        self._beside = threads_may_call_mpi()
        pause = sleep if crowded else no_pause
        self._staging = StagingBuffers(self._node, timeout)
        numbers = self._node.numbers
        places = NodesOfRanks(comm.rank, self._node.homes)
        self._collectives = Collectives(comm, places, self._staging, timeout)
        self._messages = Messages(self._message_comm, numbers, timeout, pause, beside=self._beside)
        # The group has a queue and a thread of its own, so that a wait in one group does not delay the others.
        self._worker = Worker(beside=self._beside, closed=destroyed_error)
        self._worker.pause = pause
        self._freed = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # torch names a group after making it. The base class would pass the name to its backends, and there are none here.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    # Collectives in which every rank gets the data of each.

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        _check("all_gather_single", *outputs, *inputs)
        for output, source in zip(outputs, inputs, strict=True):
            _require_equal("all_gather_single", output.numel(), self._size * source.numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for whole, source in zip(wholes, inputs, strict=True):
                parts = whole.tensor_split(self._size)
                collectives.gather(as_bytes(source), parts, [len(part) for part in parts])

        return self._move(f"all_gather_single of {_sizes(inputs)}", body, outputs, opts)

    def allgather(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> CollectiveWork:  # type: ignore[override]
        written = [output for of_ranks in outputs for output in of_ranks]
        _check("all_gather", *inputs, *written)
        for of_ranks, source in zip(outputs, inputs, strict=True):
            _require_equal("all_gather", of_ranks[self.rank()].numel(), source.numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for number, source in enumerate(inputs):
                parts = wholes[number * self._size : (number + 1) * self._size]
                collectives.gather(as_bytes(source), parts, [len(part) for part in parts])

        return self._move(f"all_gather of {_sizes(written)}", body, written, opts)

    def allgather_coalesced(self, outputs: _Lists, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        # torch passes a list per rank here, and a list per input above.
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def broadcast(self, tensors: _Tensors, opts: Any) -> CollectiveWork:  # type: ignore[override]
        _check("broadcast", *tensors)
        root = opts.rootRank

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for whole in wholes:
                sizes = [len(whole) if rank == root else 0 for rank in range(self._size)]
                collectives.gather(whole, [whole if rank == root else None for rank in range(self._size)], sizes)

        return self._move(f"broadcast of {_sizes(tensors)} from rank {root}", body, tensors, opts)

    # Collectives in which every rank gets a part of its own from each.

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        _check("all_to_all", *outputs, *inputs)
        _require_equal("all_to_all", outputs[self.rank()].numel(), inputs[self.rank()].numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            outgoing = [as_bytes(source) for source in inputs]
            collectives.exchange(outgoing, wholes, collectives.longest(max(map(len, outgoing))))

        return self._move(f"all_to_all of {inputs[0].dtype}", body, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> CollectiveWork:
        _check("all_to_all_single", output, input)
        taken = _splits("output", output, output_splits, self._size)
        given = _splits("input", input, input_splits, self._size)
        _require_equal("all_to_all_single", taken[self.rank()], given[self.rank()])
        even = not output_splits and not input_splits

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            outgoing = as_bytes(input).split(given)
            # Uneven parts of other ranks may be longer than this rank's.
            longest = given[0] if even else collectives.longest(max(given))
            collectives.exchange(outgoing, wholes[0].split(taken), longest)

        sizes = _sizes([input]) if even else str(input.dtype)
        return self._move(f"all_to_all_single of {sizes}", body, [output], opts)

    def gather(self, outputs: _Lists, inputs: _Tensors, opts: Any) -> CollectiveWork:  # type: ignore[override]
        _check("gather", *inputs, *(output for each in outputs for output in each))
        root, source = opts.rootRank, inputs[0]
        mine = list(outputs[0]) if self.rank() == root else []
        for output in mine:
            _require_equal("gather", output.numel(), source.numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            own = as_bytes(source)
            outgoing = [own if rank == root else None for rank in range(self._size)]
            collectives.exchange(outgoing, wholes or [None] * self._size, len(own))

        return self._move(f"gather of {_sizes(inputs)} to rank {root}", body, mine, opts)

    def scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any) -> CollectiveWork:  # type: ignore[override]
        _check("scatter", *outputs, *(source for each in inputs for source in each))
        root, output = opts.rootRank, outputs[0]
        sources = list(inputs[0]) if self.rank() == root else []
        for source in sources:
            _require_equal("scatter", source.numel(), output.numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            outgoing: _Parts = [as_bytes(source) for source in sources] or [None] * self._size
            incoming = [wholes[0] if rank == root else None for rank in range(self._size)]
            collectives.exchange(outgoing, incoming, len(wholes[0]))

        return self._move(f"scatter of {_sizes(outputs)} from rank {root}", body, outputs, opts)

    # Collectives in which every rank gets a sum over all.

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> CollectiveWork:  # type: ignore[override]
        return self._reduce("all_reduce", tensors, opts, None)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> CollectiveWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: _Tensors, opts: Any) -> CollectiveWork:  # type: ignore[override]
        return self._reduce("reduce", tensors, opts, opts.rootRank)

    def _reduce(self, what: str, tensors: _Tensors, opts: Any, root: int | None) -> CollectiveWork:
        """Replace the tensors by their reduction, on the rank ``root`` alone if given."""
        _check(what, *tensors)
        reduction, keeps = self._reduction(tensors, opts), root not in (None, self.rank())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for whole in wholes:
                total = whole.clone() if keeps else whole
                collectives.reduce_everywhere(total.view(reduction.dtype), reduction)

        to = "" if root is None else f" to rank {root}"
        return self._move(f"{what} ({reduction.name}) of {_sizes(tensors)}{to}", body, tensors, opts)

    def reduce_scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any = None) -> CollectiveWork:  # type: ignore[override]
        _check("reduce_scatter", *outputs, *(source for each in inputs for source in each))
        reduction = self._reduction(outputs, opts)
        for output, each in zip(outputs, inputs, strict=True):
            _require_equal("reduce_scatter", output.numel(), each[self.rank()].numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for whole, parts in zip(wholes, inputs, strict=True):
                collectives.reduce([flat(part) for part in parts], whole.view(reduction.dtype), reduction)

        sizes = _sizes([source for each in inputs for source in each])
        return self._move(f"reduce_scatter ({reduction.name}) of {sizes}", body, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        _check("reduce_scatter_single", *outputs, *inputs)
        reduction = self._reduction(outputs, opts)
        for output, source in zip(outputs, inputs, strict=True):
            _require_equal("reduce_scatter_single", source.numel(), self._size * output.numel())

        def body(collectives: Collectives, wholes: _Tensors) -> None:
            for whole, source in zip(wholes, inputs, strict=True):
                collectives.reduce(flat(source).tensor_split(self._size), whole.view(reduction.dtype), reduction)

        return self._move(f"reduce_scatter_single ({reduction.name}) of {_sizes(inputs)}", body, outputs, opts)

    # What PyTorch before 2.13 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Messages and the barrier.

    def send(self, tensors: _Tensors, dst: int, tag: int) -> MessageWork:
        _check("send", *tensors)
        HpctrainGroup.moved += tensors[0].nbytes
        return self._messages.send(tensors[0], dst, tag)

    def recv(self, tensors: _Tensors, src: int, tag: int) -> MessageWork:
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> MessageWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: _Tensors, source: int | None, tag: int) -> MessageWork:
        _check("recv", *tensors)
        HpctrainGroup.moved += tensors[0].nbytes
        return self._messages.receive(tensors[0], source, tag)

    def barrier(self, opts: Any = None) -> CollectiveWork:
        return self._submit("barrier", Collectives.barrier, [], opts)

    def shutdown(self) -> None:
        """Leave the group; ``destroy_process_group`` calls it. Collective over it, but not while an error is handled.

        A rank whose ``finally`` block leaves the group must not wait there for ranks that wait for it: its error could
        never end the run. The group is then freed at the end, if all ranks get there.
        """
        if sys.exception() is not None or self._freed:
            return
        self._freed = True
        self._worker.close()
        self._messages.close()
        self._timeout.finish(self._comm.Ibarrier, _LEAVING)
        with self._timeout.blocking(_LEAVING):
            self._staging.free()
            self._node.free()
            self._message_comm.Free()
            self._comm.Free()

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks; the run itself names those that do not come."""
        self.barrier().wait()

    def _move(
        self, what: str, move: Callable[[Collectives, _Tensors], None], outputs: _Tensors, opts: Any
    ) -> CollectiveWork:
        """Submit a collective that gets its outputs as bytes in one dimension, which are given back to them."""

        def body(collectives: Collectives) -> None:
            wholes = [as_bytes(output) for output in outputs]
            move(collectives, wholes)
            for output, whole in zip(outputs, wholes, strict=True):
                give_back(output, whole)

        return self._submit(what, body, outputs, opts)

    def _submit(self, what: str, body: Body, outputs: _Tensors, opts: Any) -> CollectiveWork:
        HpctrainGroup.moved += sum(output.nbytes for output in outputs)
        # One that its caller waits for runs in the caller's thread, after those before it.
        small = not self._beside or not (opts is None or opts.asyncOp)
        work = CollectiveWork(self._worker, self._collectives, what, body, outputs, small=small)
        self._worker.submit(work)
        return work

    def _reduction(self, tensors: _Tensors, opts: Any) -> Reduction:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return Reduction.of(operation, tensors[0].dtype, self._size)


def _check(what: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuse tensors outside of the CPU's memory, and tensors of several types."""
    for tensor in (first, *others):
        if tensor.device.type != "cpu":
            raise HpctrainError(
                "HT-group-bad-argument",
                "{call}: the process group {group} moves tensors in the CPU's memory, not on {device}",
                "--backend nccl has process groups on GPUs",
                call=what,
                group=NAME,
                device=tensor.device,
            )
        if tensor.dtype != first.dtype:
            raise HpctrainError(
                "HT-group-bad-argument",
                "{call}: tensors of different types, {dtype} and {other}",
                call=what,
                dtype=first.dtype,
                other=tensor.dtype,
            )


def _require_equal(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise HpctrainError(
            "HT-group-bad-argument",
            "{call}: a tensor or a part has {found} elements instead of {wanted}",
            call=what,
            found=found,
            wanted=wanted,
        )


def _splits(which: str, tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int]:
    """The size in bytes of each rank's part of a tensor that is cut along its first dimension."""
    length = tensor.shape[0] if tensor.dim() else 0
    parts = list(splits) or [length // ranks] * ranks
    if len(parts) != ranks or sum(parts) != length:
        raise HpctrainError(
            "HT-group-bad-argument",
            "all_to_all_single: the {side} has {length} rows, but its parts {parts} add up to {sum} for {ranks} ranks",
            side=which,
            length=length,
            parts=parts,
            sum=sum(parts),
            ranks=ranks,
        )
    row = tensor.nbytes // length if length else 0
    return [part * row for part in parts]


def _sizes(tensors: Iterable[torch.Tensor]) -> str:
    """The sizes and types of tensors, for messages; ranks compare them to notice different calls."""
    return ", ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
