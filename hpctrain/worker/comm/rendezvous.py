"""The rendezvous for torch.distributed: a store on rank 0's host, whose address MPI or torchrun's variables tell."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpctrain.common.cluster.launcher import SRUN_NONE, TORCHRUN_MARK
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.addresses import INTERFACE, REMEDY, RankAddresses, exchange_addresses, listener, listener_at
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# Of ranks that srun started; a process that leaves its run and joins again would find the port of an earlier one taken.
_kept: list[TCPStore] = []


def rendezvous(world: MPI.Intracomm, host: str, limit: timedelta) -> tuple[TCPStore, RankAddresses]:
    """Make the store on rank 0 and connect to it; returns all ranks' addresses too. Collective.

    It listens at the one address that the ranks need: that of the loopback where all ranks are on one host.
    """
    timeout = Timeout(f"rank {world.rank} on {host}")
    make_socket = listener if world.rank == 0 else None
    ranks = exchange_addresses(world, host, timeout, "the rendezvous for torch.distributed", make_socket)
    return _store(ranks.endpoints[0], world.size, limit, ranks.own_socket), ranks


def _store(where: tuple[str, int], ranks: int, limit: timedelta, own: socket.socket | None) -> TCPStore:
    address, port = where
    try:
        if own is None:
            return TCPStore(address, port, ranks, False, limit)
        # The store owns the socket from here on, and closes it at its own end.
        return TCPStore(address, port, ranks, True, limit, wait_for_workers=False, master_listen_fd=own.detach())
    except RuntimeError as error:
        raise HpctrainError(
            "HT-network-unreachable",
            "the store of torch.distributed at {address}:{port} cannot be reached: {reason}",
            REMEDY,
            address=address,
            port=port,
            reason=str(error),
        ) from error


def store_without_mpi(limit: timedelta) -> Any:
    """The store by torchrun's variables: that of its agents, or of rank 0 where srun started the ranks."""
    if not os.environ[TORCHRUN_MARK].startswith(SRUN_NONE):
        return next(dist.rendezvous("env://", timeout=limit))[0]  # type: ignore[attr-defined]
    if not _kept:
        hosts, port = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
        name = os.environ["MASTER_ADDR"] if hosts > 1 else "127.0.0.1"
        serves, size = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
        if (own := listener_at(name, port, hosts) if serves else None) or not serves:
            _kept.append(_store((name, port), size, limit, own))
        else:
            # The name is one of the loopback here and one of the network elsewhere: PyTorch's own socket serves both.
            _kept.append(TCPStore(name, port, size, True, limit, wait_for_workers=False))
    return _kept[0]


def make_default_group(backend: str, store: Any, rank: int, size: int, limit: timedelta) -> None:
    """Make torch.distributed's default group of the run by PyTorch's own function. Collective.

    A script's ``init_process_group`` is wrapped so that it joins this group.
    """
    show = sys.excepthook
    make = inspect.unwrap(dist.init_process_group)
    make(backend, store=store, rank=rank, world_size=size, timeout=limit)
    # PyTorch's own hook would hold back the traceback until the process has ended, and each group adds one.
    sys.excepthook = show


@contextlib.contextmanager
def listening_at(address: str | None) -> Iterator[None]:
    """A context manager in which new Gloo groups listen at the interface with this address; None leaves it to Gloo.

    By itself Gloo takes the address that the host's name resolves to, which may be another network's or the loopback's.
    """
    interfaces = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(address == entry.address.partition("%")[0] for entry in entries)
    ]
    if not interfaces or INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = interfaces[0]
    try:
        yield
    finally:
        del os.environ[INTERFACE]
