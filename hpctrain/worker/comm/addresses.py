"""At which address the ranks of other hosts reach this one, for libraries that connect by themselves."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# The longest host name has 64 characters on Linux, the longest address 45, a port 5.
_TEXT_BYTES = 128
INTERFACE = "GLOO_SOCKET_IFNAME"
REMEDY = f"name the network interface between the hosts: {INTERFACE}=NAME; `ip link` lists them"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a run are.

    Attributes:
        hosts: every rank's.
        places: every rank's address, and the port that it took there; 0 where it took none.
        port: this rank's socket with that port.
    """

    hosts: list[str]
    places: list[tuple[str, int]]
    port: socket.socket | None


def meet(
    world: MPI.Intracomm, host: str, timeout: Timeout, what: str, take: Callable[[str], socket.socket] | None
) -> Meeting:
    """Tell all ranks where each of them is. Collective.

    Args:
        world: the ranks.
        host: this rank's.
        timeout: how long they wait for each other.
        what: they meet for.
        take: makes this rank's socket for its address: :func:`listener` or :func:`reservation`. None for a rank that
            needs no port.

    Raises:
        HpctrainError: hosts that do not know each other's names, or an interface without an address.
    """
    hosts = _everyones(world, host, timeout, what)
    address, failure, port = "", None, None
    try:
        address = own_address(host, hosts)
        port = take(address) if take else None
    except (OSError, HpctrainError) as error:
        failure = error
    # A rank that failed takes part as well, or the others would wait for it.
    own = "" if failure else f"{address} {port.getsockname()[1] if port else 0}"
    said = _everyones(world, own, timeout, what)
    if failure:
        raise failure if isinstance(failure, HpctrainError) else HpctrainError(f"{host}: {failure}", REMEDY)
    if "" in said:
        rank = said.index("")
        raise HpctrainError(f"rank {rank} on {hosts[rank]} has no address that the others can reach", REMEDY)
    return Meeting(hosts=hosts, places=[(text.split()[0], int(text.split()[1])) for text in said], port=port)


def listener(address: str) -> socket.socket:
    """A socket that listens on a free port of this address."""
    return socket.create_server((address, 0), family=_family(address))


def listener_at(name: str, port: int, hosts: int) -> socket.socket | None:
    """A socket that listens on this port, 0 for a free one, of the address that this host's name has.

    None if that address is not the one at which all of this number of hosts reach this one: that of a proxy before it,
    or one of the loopback interface, which Debian gives a host's own name in /etc/hosts.

    Raises:
        HpctrainError: the name is unknown, or the port is taken.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(where[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise HpctrainError(
            f"cannot listen on port {port} of {name}: {error.strerror}",
            "choose a free one for all hosts with the variable MASTER_PORT",
            exit_code=1,
        ) from error
    if hosts > 1 and ipaddress.ip_address(found.getsockname()[0]).is_loopback:
        # Nor at the address of the way to the others: this host's own ranks know only the name.
        found.close()
        return None
    return found


def reservation(address: str) -> socket.socket:
    """A socket by which a free port is this process's, for a library that makes a socket of its own from its number.

    It does not listen, so that one with ``SO_REUSEADDR`` can take the port over, and the system gives it to nobody
    else while this one is open.
    """
    found = socket.socket(_family(address))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((address, 0))
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _everyones(world: MPI.Intracomm, text: str, timeout: Timeout, what: str) -> list[str]:
    """The texts of all ranks, in their order. Collective."""
    own = np.zeros(_TEXT_BYTES, dtype=np.uint8)
    encoded = text.encode()[:_TEXT_BYTES]
    own[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
    everyone = np.empty((world.size, _TEXT_BYTES), dtype=np.uint8)
    timeout.wait(world.Iallgather(own, everyone).Test, what)
    return [row.tobytes().rstrip(b"\0").decode() for row in everyone]


def own_address(host: str, hosts: Sequence[str]) -> str:
    """The address at which the other ranks reach this host: the loopback's where all are on it.

    Raises:
        HpctrainError: no way to another host, or no such interface.
    """
    if named := os.environ.get(INTERFACE):
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
        raise HpctrainError(f"{host} has no route to {others[0]}: {error.strerror}", REMEDY) from error


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs()
    for entry in found.get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return str(entry.address).partition("%")[0]
    raise HpctrainError(
        f"{INTERFACE}={interface}: {socket.gethostname()} has no such interface with an address",
        f"valid: {', '.join(sorted(found))}",
    )
