"""The addresses at which ranks on different hosts reach each other, for libraries that connect by themselves."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from hpctrain.common.cluster.launcher import detect
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.connecting import mpi_world
from hpctrain.worker.comm.forgotten import ignore_import
from hpctrain.worker.comm.mpi_collectives import allgather
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


INTERFACE = "GLOO_SOCKET_IFNAME"
REMEDY = f"name the network interface between the hosts: {INTERFACE}=NAME; `ip link` lists them"


@dataclass(frozen=True, kw_only=True)
class RankAddresses:
    """The hosts of all ranks with their addresses and ports, 0 for a rank without a socket; and this rank's socket."""

    hosts: list[str]
    endpoints: list[tuple[str, int]]
    own_socket: socket.socket | None


def exchange_addresses(
    world: MPI.Intracomm, host: str, timeout: Timeout, what: str, make_socket: Callable[[str], socket.socket] | None
) -> RankAddresses:
    """Tell all ranks the address of each. Collective.

    ``make_socket`` binds this rank's socket to its address: :func:`listener`, :func:`reservation`, or None for no port.
    """
    hosts = allgather(world, timeout, host, what)
    own: tuple[str, int] | Exception
    own_socket = None
    try:
        address = own_address(host, hosts)
        own_socket = make_socket(address) if make_socket else None
        own = address, own_socket.getsockname()[1] if own_socket else 0
    except (HpctrainError, OSError) as error:
        own = error
    # A rank that failed takes part as well, or the others would wait for it.
    endpoints = []
    for end in allgather(world, timeout, own, what):
        if isinstance(end, Exception):
            raise end
        endpoints.append(end)
    return RankAddresses(hosts=hosts, endpoints=endpoints, own_socket=own_socket)


def listener(address: str) -> socket.socket:
    """A socket that listens on a free port of this address."""
    return socket.create_server((address, 0), family=_family(address))


def listener_at(name: str, port: int, hosts: int) -> socket.socket | None:
    """A socket that listens at the address that ``name`` resolves to; port 0 takes a free one.

    None if other hosts cannot reach this one there: it is a proxy's address, or one of the loopback interface, which
    Debian gives a host's own name in /etc/hosts.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(where[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise HpctrainError(
            "HT-fabric-port-taken",
            "cannot listen on port {port} of {host}: {reason}",
            "the port follows from the path of the run's directory: choose another one with --run-dir; under srun, "
            "--env MASTER_ADDR=ADDRESS takes the place of a name that leads nowhere",
            exit_code=1,
            port=port,
            host=name,
            reason=error.strerror,
        ) from error
    if hosts > 1 and ipaddress.ip_address(server.getsockname()[0]).is_loopback:
        # The address on the route to the others is no use either: this host's own ranks know only the name.
        server.close()
        return None
    return server


def reservation(address: str) -> socket.socket:
    """A socket that reserves a free port for a library that opens its own socket by the port's number.

    It does not listen, so that a socket with ``SO_REUSEADDR`` can take the port over, and while it is open the system
    gives the port to no other process.
    """
    reserved = socket.socket(_family(address))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(host: str, hosts: Sequence[str]) -> str:
    """The address at which the other ranks reach this host: the loopback's where all are on it."""
    if named := os.environ.get(INTERFACE):
        return _address_of(named.split(",")[0])
    others = [other for other in hosts if other != host]
    if not others:
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting UDP sends nothing: the kernel looks up the route, and the source address that it implies.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HpctrainError(
            "HT-network-unreachable",
            "{host} has no route to {other}: {reason}",
            REMEDY,
            host=host,
            other=others[0],
            reason=error.strerror,
        ) from error


def _address_of(interface: str) -> str:
    interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return str(entry.address).partition("%")[0]
    raise HpctrainError(
        "HT-interface-not-usable",
        "{variable}={interface}: {host} has no such interface with an address",
        f"valid: {', '.join(sorted(interfaces))}",
        variable=INTERFACE,
        interface=interface,
        host=socket.gethostname(),
    )


VARIABLE = "TF_CONFIG"
# Of a script that makes its strategy by itself; its port stays reserved until the process ends.
_reserved: list[socket.socket] = []


def write_tf_config(world: MPI.Intracomm, host: str, timeout: Timeout, tasks: Sequence[str]) -> socket.socket:
    """Tell all ranks each other's addresses, and write them to ``TF_CONFIG`` of this process. Collective.

    An earlier ``TF_CONFIG``, inherited from a cluster or another process, is overwritten: it names another task.

    Args:
        tasks: ``chief``, ``worker`` or ``ps``, for every rank.

    Returns the socket that reserves this process's port for TensorFlow's server; to be closed with the run.
    """
    own = tasks[world.rank]
    ranks = exchange_addresses(world, host, timeout, "the addresses of TensorFlow's servers", reservation)
    servers: dict[str, list[str]] = {}
    for task, (address, port) in zip(tasks, ranks.endpoints, strict=True):
        servers.setdefault(task, []).append(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    index = list(tasks[: world.rank]).count(own)
    os.environ[VARIABLE] = json.dumps({"cluster": servers, "task": {"type": own, "index": index}})
    assert ranks.own_socket is not None
    return ranks.own_socket


def name_workers() -> None:
    """Write ``TF_CONFIG`` for a script that makes a MultiWorkerMirroredStrategy by itself. Collective."""
    world = mpi_world(detect())
    # It was not the script that imported it.
    ignore_import("mpi4py.MPI")
    host = socket.gethostname()
    timeout = Timeout(f"rank {world.rank} on {host}")
    _reserved.append(write_tf_config(world, host, timeout, ["worker"] * world.size))
