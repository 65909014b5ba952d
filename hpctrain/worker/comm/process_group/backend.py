"""Registers the backend ``hpctrain`` with torch.distributed, and makes its groups out of the ranks of a run."""

from __future__ import annotations

import weakref
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.process_group.group import NAME, HpctrainGroup
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.rendezvous import make_default_group, rendezvous
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# The largest tag that every MPI has.
_LARGEST_TAG = 32767
# Added to hpctrain's own limit, so that hpctrain, which knows what was waited for, reports first.
_MARGIN_SECONDS = 30


class Groups:
    """The process groups of a run: ``torch.distributed`` makes groups of the backend ``hpctrain`` through this object.

    ``world`` has all ranks, in the order of torch.distributed's default group.
    """

    def __init__(self, world: MPI.Intracomm, timeout: Timeout, host: str, *, crowded: bool) -> None:
        self._timeout = timeout
        self._host = host
        self._crowded = crowded
        with timeout.blocking("forming a process group"):
            self._world = world.Dup()
        self._made: list[HpctrainGroup] = []
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
            _keep_handles_of_join()
        run.groups = self

    def join(self) -> None:
        """Make a default group of all ranks, if torch.distributed has none. Collective."""
        if dist.is_initialized():
            require_ranks(self._world.rank, self._world.size)
            return
        limit = timedelta(seconds=self._timeout.seconds + _MARGIN_SECONDS)
        # A store at which groups over other backends of these ranks, such as Gloo, can meet too.
        store, _ = rendezvous(self._world, self._host, limit)
        make_default_group(NAME, store, self._world.rank, self._world.size, limit)

    def make(self, ranks: list[int], name: str) -> HpctrainGroup:
        """A group of some ranks. Collective over them."""
        own = self._world.Get_group()
        members = own.Incl(ranks)
        with self._timeout.blocking("forming a process group"):
            comm = self._world.Create_group(members, zlib.crc32(name.encode()) % _LARGEST_TAG)
        members.Free()
        own.Free()
        group = HpctrainGroup(comm, self._timeout, crowded=self._crowded)
        self._made.append(group)
        return group

    def free(self) -> None:
        """Destroy the remaining groups. Collective over all ranks."""
        if isinstance(dist.group.WORLD, HpctrainGroup):
            dist.destroy_process_group()
        for group in self._made:
            group.shutdown()
        self._made.clear()
        with self._timeout.blocking("destroying a process group"):
            self._world.Free()
        run.groups = None


def require_ranks(rank: int, size: int) -> None:
    """Refuse a default group of torch.distributed in which this process has another rank or size."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise HpctrainError(
            "HT-group-made-otherwise",
            "torch.distributed has a default group, in which this is rank {group_rank} of {group_size}, "
            "but in the run it is rank {rank} of {size}",
            "leave init_process_group out: hpctrain makes the group",
            group_rank=dist.get_rank(),
            group_size=dist.get_world_size(),
            rank=rank,
            size=size,
        )


def _create(options: Any, _: Any) -> HpctrainGroup:
    """Create a group; torch.distributed calls this on each of its ranks."""
    groups: Groups | None = run.groups
    if groups is None:
        raise HpctrainError(
            "HT-group-without-ranks",
            "the process group {group} consists of the ranks of backend mpi, but there are none",
            "hpctrain run SCRIPT --backend mpi starts them; call ht.init() first",
            group=NAME,
        )
    return groups.make(list(options.global_ranks_in_group) or list(range(options.group_size)), options.group_id)


def _keep_handles_of_join() -> None:
    """Keep the handles by which DDP's ``join()`` counts the ranks that still train.

    DDP gives its handle to C++ alone, whose wait has no end once the Python object is gone.
    """
    notify = Join.notify_join_context
    handles: weakref.WeakKeyDictionary[Joinable, Any] = weakref.WeakKeyDictionary()

    def notifying(joinable: Joinable) -> Any:
        handles[joinable] = work = notify(joinable)
        return work

    Join.notify_join_context = staticmethod(notifying)  # type: ignore[method-assign]
