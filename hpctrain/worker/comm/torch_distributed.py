"""The communicator over torch.distributed: Gloo for the control plane, Gloo or NCCL for PyTorch's gradients."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from hpctrain.common.cluster.gpus import require_shareable, sharing_variables
from hpctrain.common.cluster.launcher import TORCHRUN_MARK
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.settings import SHARE_GPUS, TIMEOUT
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.addresses import own_address
from hpctrain.worker.comm.base import SUMMING, AnyArray, Group, Reduction
from hpctrain.worker.comm.boards import StoreBoard
from hpctrain.worker.comm.control import Bytes, CheckedControl, Words
from hpctrain.worker.comm.rank_gpus import gpu_number
from hpctrain.worker.comm.rendezvous import listening_at, make_default_group, rendezvous, store_without_mpi
from hpctrain.worker.comm.timeout import Timeout
from hpctrain.worker.comm.torch_distributed_engine import TorchDistributedEngine

if TYPE_CHECKING:
    from mpi4py import MPI

# PyTorch's backend strings: with "cpu:gloo,cuda:nccl" a tensor's device chooses the library.
_GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Added to hpctrain's own limit, so that hpctrain, which knows what was waited for, reports first.
_MARGIN_SECONDS = 5.0

# How long the thread that watches waits may take to end: the process that keeps the store may be stopped.
_LEAVE_SECONDS = 2.0
# torchrun's store outlives a group. A later group must not find the addresses of an earlier one there.
_joined = itertools.count()


class TorchDistributedCommunicator(CheckedControl):
    """The ranks of torch.distributed's default group, which this object creates and destroys.

    Objects are pickled and travel on Gloo's connections between the ranks, never through the store, which any process
    that reaches its port could write to. ``world`` has the ranks that MPI started; None for all others.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], reason: str, world: MPI.Intracomm | None) -> None:
        super().__init__(reason)
        self.backend: str = backend
        self._group_of = _GROUPS[backend]
        self.on_gpus = backend == "nccl"
        self.in_host_memory = not self.on_gpus
        # The collectives of hpctrain itself on the default group, and the groups that it has made.
        self._own_calls = self._own_groups = 0
        # Where this rank's Gloo groups listen, those of the script too, until it leaves the run.
        self._listening = ExitStack()
        # Whether the script has called the groups itself. One that has destroyed them is taken to have done so.
        self._called = True
        if dist.is_initialized():
            raise HpctrainError(
                "HT-group-made-otherwise",
                "torch.distributed already has a process group",
                "leave init_process_group out: ht.init() makes it",
            )
        if self.on_gpus and not dist.is_nccl_available():
            raise HpctrainError(
                "HT-backend-unavailable",
                "this PyTorch, {version}, is built without NCCL",
                "choose --backend gloo or mpi, or install PyTorch's build for CUDA",
                version=torch.__version__,
            )
        limit = timedelta(seconds=TIMEOUT.read() + _MARGIN_SECONDS)
        try:
            store = self._join_mpi(world, limit) if world is not None else self._join_torchrun(limit)
        except RuntimeError as error:
            self._listening.close()
            raise self._failed(error, "making the group") from error
        self.timeout = Timeout(f"rank {self.rank} on {self.host}")
        self._engine: TorchDistributedEngine | None = None
        try:
            if self.size > 1:
                self._watch_waits(StoreBoard(store, self.rank, self.size))
            if self.on_gpus:
                _take_gpu(self)
        except BaseException:
            self._watch_no_more(_LEAVE_SECONDS)
            self._listening.close()
            dist.destroy_process_group()
            raise

    def _join_mpi(self, world: MPI.Intracomm, limit: timedelta) -> Any:
        store, ranks = rendezvous(world, self.host, limit)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = ranks.hosts[: self.rank].count(self.host), ranks.hosts.count(self.host)
        self._listening.enter_context(listening_at(ranks.endpoints[self.rank][0]))
        make_default_group(self._group_of, store, self.rank, self.size, limit)
        return store

    def _join_torchrun(self, limit: timedelta) -> Any:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        name = f"hpctrain-{os.environ[TORCHRUN_MARK]}-{next(_joined)}"
        own = dist.PrefixStore(name, store_without_mpi(limit))  # type: ignore[attr-defined]
        self._listening.enter_context(listening_at(self._torchruns_address(own)))
        make_default_group(self._group_of, own, self.rank, self.size, limit)
        return own

    def _torchruns_address(self, store: Any) -> str | None:
        """The address at which ranks of other hosts reach this one; None if it cannot be found out.

        By itself Gloo listens at the address of the host's name, which on Debian is one of the loopback interface. The
        first host knows no other host's name, so the last rank sends it an address.
        """
        if self.local_size == self.size:
            return "127.0.0.1"
        key = "an address on another host"
        other = store.get(key).decode() if os.environ["GROUP_RANK"] == "0" else os.environ["MASTER_ADDR"]
        own = own_address(self.host, [other])
        if self.rank == self.size - 1:
            store.set(key, own)
        return None if ipaddress.ip_address(own).is_loopback else own

    def trains_together(self) -> bool:
        # ht.init() makes the group on which DDP or FSDP may have built.
        if dist.is_initialized():
            default: Any = dist.group.WORLD
            calls = default._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
            # hpctrain itself uses NCCL in groups of its own alone.
            by_nccl = self.on_gpus and default._get_backend(torch.device("cuda"))._is_initialized()
            further = len(dist.distributed_c10d._world.pg_map) > 1 + self._own_groups
            self._called = calls > self._own_calls or by_nccl or further
        return super().trains_together() or self._called

    # The control plane: its tensors are in the CPU's memory, so they travel by Gloo.

    def _maximum(self, words: Words, what: str) -> None:
        # Gloo's all-gather takes half as many steps as its all-reduce.
        everyone = self._rows(torch.from_numpy(words), len(words), what)
        np.maximum.reduce([row.numpy() for row in everyone], axis=0, out=words)

    def _overwrite(self, buffer: Bytes, root: int, what: str) -> None:
        # torch warns about read-only memory, which pickle returns.
        tensor = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
        self.run(dist.broadcast, tensor, root, what=what)

    def _gather(self, own: Bytes, longest: int, what: str) -> Sequence[Bytes]:
        return [row.numpy() for row in self._rows(torch.from_numpy(own.copy()), longest, what)]

    def _reduce(self, array: AnyArray, reduction: Reduction, what: str) -> AnyArray:
        received: AnyArray = np.array(array, order="C")
        self.run(dist.all_reduce, torch.from_numpy(received), _OPERATIONS[reduction], what=what)
        return received

    def group(self, size: int | None = None, what: str = SUMMING) -> TorchDistributedGroup:
        return TorchDistributedGroup(self, size or self.size, what)

    def new_group(self, size: int) -> Any:
        """A new group of ``size`` neighbouring ranks, with connections of its own."""
        limit = timedelta(seconds=TIMEOUT.read() + _MARGIN_SECONDS)
        self._meet(f"groups of {size} ranks", "making groups of ranks")
        try:
            # torch.distributed requires every rank to make every group.
            starts = range(0, self.size, size)
            groups = [dist.new_group(list(range(start, start + size)), limit, self._group_of) for start in starts]
        except RuntimeError as error:
            raise self._failed(error, "making groups of ranks") from error
        self._own_groups += 1
        return groups[self.rank // size]

    # Collectives that both planes use.

    def gather(self, flat: torch.Tensor, what: str, members: Any) -> list[torch.Tensor]:
        """The flat tensors of all ranks, which may differ in length, through the group ``members``."""
        lengths = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        own = torch.tensor([len(flat)], device="cpu")
        self.run(dist.all_gather, lengths, own, members, what=what)
        parts = self._rows(flat, max(1, *(int(length) for length in lengths)), what, members)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def _rows(self, flat: torch.Tensor, longest: int, what: str, members: Any = None) -> list[torch.Tensor]:
        """The flat tensors of all ranks, each padded with zeros to the length ``longest``."""
        padded = flat.new_zeros(longest)
        padded[: len(flat)] = flat
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.run(dist.all_gather, parts, padded, members, what=what)
        return parts

    def start(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Start a collective; returns torch.distributed's handle."""
        forks.require_rank(collective.__name__)
        if not dist.is_initialized():
            raise HpctrainError("HT-communicator-after-shutdown", "the communicator was used after shutdown()")
        self._own_calls += not any(isinstance(argument, dist.ProcessGroup) for argument in arguments)
        try:
            return collective(*arguments, async_op=True)
        except RuntimeError as error:
            raise self._failed(error, collective.__name__) from error

    def finish(self, handle: Any, what: str, *, on_gpu: bool = False) -> None:
        """Wait for a collective. On a GPU only its stream waits, and NCCL's own watchdog ends what takes too long."""
        try:
            if not on_gpu:
                self.timeout.wait(handle.is_completed, what)
            handle.wait()
        except RuntimeError as error:
            raise self._failed(error, what) from error

    def run(self, collective: Callable[..., Any], *arguments: Any, what: str) -> None:
        """Start a collective and wait for it."""
        tensors = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        self.finish(self.start(collective, *arguments), what, on_gpu=tensors[0].is_cuda)

    def _failed(self, error: Exception, what: str) -> HpctrainError:
        # Gloo's messages begin with a source file, and end with advice.
        text = re.sub(r"^\[\S*\] | This is typically .*", "", str(error).splitlines()[0])
        return TransientError(
            "HT-collective-failed",
            "rank {rank} on {host}: torch.distributed failed in {call}: {reason}",
            "another rank failed or stopped earlier: its own log says why",
            exit_code=1,
            rank=self.rank,
            host=self.host,
            call=what,
            reason=text,
        )

    # The data plane.

    def torch(self) -> TorchDistributedEngine:
        """The engine, with connections of its own, so that no value of the control plane is added to a gradient."""
        if self._engine is None:
            self._engine = TorchDistributedEngine(self, self.new_group(self.size))
        return self._engine

    def _process_group(self) -> None:
        if not dist.is_initialized():
            raise HpctrainError(
                "HT-group-destroyed",
                "torch.distributed's group was destroyed, and with it the connections of the run",
                "leave destroy_process_group, or what calls it, to the end of the script",
            )

    def tensorflow(self) -> NoReturn:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} reduces PyTorch's gradients, but this is Keras",
            "choose --backend mpi, or horovod, which use GPUs too; torchrun starts neither: hpctrain run does",
            backend=self.backend,
        )

    def shutdown(self) -> None:
        try:
            # Leaving closes a rank's connections, and rank 0's store, which others may still use.
            if dist.is_initialized():
                self.barrier()
        finally:
            if self._engine is not None:
                self._engine.close()
            # The watch holds the store, and rank 0's store listens as long as any reference to it exists.
            self._watch_no_more(_LEAVE_SECONDS)
            if dist.is_initialized():
                dist.destroy_process_group()
            self._listening.close()


def _take_gpu(comm: TorchDistributedCommunicator) -> None:
    """Make the GPU of this local rank the one that ``cuda`` means, or refuse where ranks would have to share one.

    Where they are to share them, NCCL is told so before its first collective makes it connect the ranks.
    """
    if SHARE_GPUS.read():
        require_shareable(comm.allgather_object((comm.host, comm.local_size, torch.cuda.device_count())))
        for name, value in sharing_variables(comm.rank, comm.host).items():
            os.environ.setdefault(name, value)
    own = gpu_number(comm, required=True)
    assert own is not None
    torch.cuda.set_device(own)


class TorchDistributedGroup(Group):
    """A subset of the ranks: tensors on GPUs travel by NCCL, others by Gloo."""

    def __init__(self, comm: TorchDistributedCommunicator, size: int, what: str) -> None:
        super().__init__(comm.rank % size, size)
        self._comm = comm
        self._members = comm.new_group(size)
        self._what = what

    def allreduce(self, array: AnyArray) -> AnyArray:
        reduced: AnyArray = self.allreduce_torch(torch.from_numpy(array)).numpy()
        return reduced

    def allreduce_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        summed = (reduced, dist.ReduceOp.SUM, self._members)
        self._comm.run(dist.all_reduce, *summed, what=self._what)
        return reduced
