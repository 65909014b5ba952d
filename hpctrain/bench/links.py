"""Bandwidth and latency between ranks, pair by pair.

``python links.py OUT.json ROUNDS.json BYTES`` on every rank. ROUNDS holds, for each round, the pairs of sender and
receiver that run at the same time (:func:`hpctrain.topology.verify.rounds`). Needs MPI alone: no framework, no Horovod.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

_ADAPTERS = Path("/sys/class/infiniband")
_PORT_ACTIVE = "4:"
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# The first messages set up connections and register memory.
_WARMUP = 5
_PINGS = 100
_REPEATS = 5
_MESSAGES = 8


def choose_adapter() -> str:
    """Take the InfiniBand adapter of this rank's number on its host, before MPI starts; its name, or the rank's."""
    local = next((int(os.environ[name]) for name in _LOCAL_RANK if name in os.environ), 0)
    ports = _active_ports()
    if not ports:
        return f"rank {local}"
    adapter = sorted(ports, key=lambda name: (len(name), name))[local % len(ports)]
    os.environ["UCX_NET_DEVICES"] = f"{adapter}:{ports[adapter]}"
    return adapter


def _active_ports() -> dict[str, int]:
    """The first InfiniBand port of each adapter that is up; an adapter without one carries nothing."""
    ports: dict[str, int] = {}
    for port in sorted(_ADAPTERS.glob("*/ports/*"), key=lambda path: int(path.name)):
        layer, state = ((port / name).read_text().strip() for name in ("link_layer", "state"))
        if layer == "InfiniBand" and state.startswith(_PORT_ACTIVE):
            ports.setdefault(port.parents[1].name, int(port.name))
    return ports


def measure(comm: MPI.Comm, pairs: list[tuple[int, int]], size: int) -> dict[str, Any] | None:
    """Send or receive in one round; returns what the sender measured, None on the others."""
    rank = comm.rank
    sending = dict(pairs)
    receiving = {target: source for source, target in pairs}
    buffer = np.ones(size, np.uint8)
    comm.Barrier()
    if rank in sending:
        peer = sending[rank]
        latency = statistics.median(_ping(comm, peer) for _ in range(_WARMUP + _PINGS))
        seconds = [_send(comm, peer, buffer) for _ in range(1 + _REPEATS)][1:]
        return {
            "source": rank,
            "target": peer,
            "latency": latency,
            "bandwidth": _MESSAGES * size / statistics.median(seconds),
        }
    if rank in receiving:
        peer = receiving[rank]
        for _ in range(_WARMUP + _PINGS):
            _pong(comm, peer)
        for _ in range(1 + _REPEATS):
            _receive(comm, peer, buffer)
    return None


def _ping(comm: MPI.Comm, peer: int) -> float:
    word = np.zeros(1)
    start = time.perf_counter()
    comm.Send(word, peer)
    comm.Recv(word, peer)
    return (time.perf_counter() - start) / 2


def _pong(comm: MPI.Comm, peer: int) -> None:
    word = np.zeros(1)
    comm.Recv(word, peer)
    comm.Send(word, peer)


def _send(comm: MPI.Comm, peer: int, buffer: np.ndarray[Any, Any]) -> float:
    done = np.zeros(1)
    start = time.perf_counter()
    for request in [comm.Isend(buffer, peer) for _ in range(_MESSAGES)]:
        request.Wait()
    comm.Recv(done, peer)
    return time.perf_counter() - start


def _receive(comm: MPI.Comm, peer: int, buffer: np.ndarray[Any, Any]) -> None:
    for _ in range(_MESSAGES):
        comm.Recv(buffer, peer)
    comm.Send(np.zeros(1), peer)


def main(out: str, rounds: str, size: str) -> None:
    device = choose_adapter()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    devices = comm.gather(device)
    flows: list[dict[str, Any]] = []
    for number, pairs in enumerate(json.loads(Path(rounds).read_text())):
        measured = measure(comm, [(source, target) for source, target in pairs], int(size))
        flows += [{"round": number, **flow} for flow in comm.gather(measured) or [] if flow]
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"devices": devices, "flows": flows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
