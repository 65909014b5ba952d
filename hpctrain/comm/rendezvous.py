"""The rendezvous for torch.distributed of ranks that MPI started: a store on rank 0's host, its address sent by MPI."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpctrain.comm.timeout import Timeout
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from mpi4py import MPI

# The longest host name has 64 characters on Linux, the longest address 45, a port 5.
_TEXT_BYTES = 128
_INTERFACE = "GLOO_SOCKET_IFNAME"
_REMEDY = f"name the network interface between the hosts: {_INTERFACE}=NAME; `ip link` lists them"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The store that all ranks reach, this rank's place, and this host's address."""

    store: TCPStore
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


def rendezvous(world: MPI.Intracomm, host: str, limit: timedelta) -> Rendezvous:
    """Make the store on rank 0 and connect to it. Collective.

    It listens on a port that the system finds free, at no other address than the one the ranks need: that of the
    loopback where all are on one host.

    Raises:
        HpctrainError: hosts that do not know each other's names, or a store that cannot be reached.
    """
    timeout = Timeout(f"rank {world.rank} on {host}")
    hosts = _everyones(world, host, timeout)
    address, failure = "", None
    listener = None
    try:
        address = _own_address(host, hosts)
        if world.rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family)
    except (OSError, HpctrainError) as error:
        failure = error
    # A rank that failed takes part as well, or the others would wait for it.
    said = _everyones(world, "" if failure else f"{address} {listener.getsockname()[1] if listener else 0}", timeout)
    if failure:
        raise failure if isinstance(failure, HpctrainError) else HpctrainError(f"{host}: {failure}", _REMEDY)
    if "" in said:
        rank = said.index("")
        raise HpctrainError(f"rank {rank} on {hosts[rank]} has no address for the others", _REMEDY)
    return Rendezvous(
        store=_store(said[0], world.size, limit, listener),
        rank=world.rank,
        size=world.size,
        local_rank=hosts[: world.rank].count(host),
        local_size=hosts.count(host),
        address=address,
    )


def _store(where: str, ranks: int, limit: timedelta, listener: socket.socket | None) -> TCPStore:
    address, port = where.split()
    try:
        if listener is None:
            return TCPStore(address, int(port), ranks, False, limit)
        # The store takes the socket over, and closes it with itself.
        return TCPStore(
            address, int(port), ranks, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except RuntimeError as error:
        raise HpctrainError(
            f"the store of torch.distributed at {address}:{port} is out of reach: {error}", _REMEDY
        ) from error


def _everyones(world: MPI.Intracomm, text: str, timeout: Timeout) -> list[str]:
    """The texts of all ranks, in their order."""
    own = np.zeros(_TEXT_BYTES, dtype=np.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    own[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
    everyone = np.empty((world.size, _TEXT_BYTES), dtype=np.uint8)
    timeout.wait(world.Iallgather(own, everyone).Test, "the rendezvous for torch.distributed")
    return [row.tobytes().rstrip(b"\0").decode() for row in everyone]


def _own_address(host: str, hosts: Sequence[str]) -> str:
    """The address at which the other ranks reach this host."""
    if named := os.environ.get(_INTERFACE):
        return _address_of(named.split(",")[0])
    others = [other for other in hosts if other != host]
    if not others:
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the kernel only looks up the way, and with it the address that packets would come from.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HpctrainError(f"{host} knows no way to {others[0]}: {error.strerror}", _REMEDY) from error


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs()
    for entry in found.get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return str(entry.address).partition("%")[0]
    raise HpctrainError(
        f"{_INTERFACE}={interface}: {socket.gethostname()} has no such interface with an address",
        f"valid: {', '.join(sorted(found))}",
    )


@contextlib.contextmanager
def listening_at(address: str | None) -> Iterator[None]:
    """A context manager in which new Gloo groups listen at the interface with this address; None leaves it to Gloo.

    By itself Gloo takes the address that the host's name has, which may be another network's, or the loopback's.
    """
    interfaces = (
        []
        if address is None
        else [
            name
            for name, entries in psutil.net_if_addrs().items()
            if address in (str(entry.address).partition("%")[0] for entry in entries)
        ]
    )
    if not interfaces or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = interfaces[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
