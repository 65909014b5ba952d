"""Bandwidth between ranks, pair by pair.

``python links.py OUT.json ROUNDS.json BYTES`` on every rank. ROUNDS holds, for each round, the pairs of sender and
receiver that run at the same time (:func:`hpctrain.control.topology.verify.rounds`). Needs MPI alone: no framework, no
Horovod.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.interfaces import ADAPTERS, all_ports

if TYPE_CHECKING:
    from mpi4py import MPI

_ADAPTERS = ADAPTERS
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

_REPEATS = 5
_MESSAGES = 8
# The time for one measurement of one flow: a slow link gets fewer messages.
_SECONDS = 0.05

# Other users of a machine or a network slow a flow down now and then, and never speed it up. So all flows are measured
# in turn several times, and the best of each counts.
_PASSES = 11


def choose_adapter() -> str:
    """Select the adapter for this local rank, before MPI starts; returns its name, or the rank's without one."""
    local = next((int(os.environ[name]) for name in _LOCAL_RANK if name in os.environ), 0)
    ports = _active_ports("InfiniBand") or _active_ports("Ethernet")
    if not ports:
        return f"rank {local}"
    adapter = sorted(ports, key=lambda name: (len(name), name))[local % len(ports)]
    os.environ["UCX_NET_DEVICES"] = f"{adapter}:{ports[adapter]}"
    return adapter


def _active_ports(layer: str) -> dict[str, int]:
    """The first active port of each adapter that training uses over that layer: over Ethernet only bonds."""
    ports: dict[str, int] = {}
    for port in all_ports(_ADAPTERS):
        name, whole = port.adapter.name, not (port.adapter / "device/physfn").exists()
        if port.link_layer == layer and whole and port.active and (layer == "InfiniBand" or "bond" in name):
            ports.setdefault(name, port.number)
    return ports


def measure(comm: MPI.Comm, pairs: list[tuple[int, int]], size: int) -> dict[str, Any] | None:
    """Send or receive in one round; returns the sender's measurement, None on the others."""
    rank = comm.rank
    sending = dict(pairs)
    receiving = {target: source for source, target in pairs}
    buffer = np.ones(size, np.uint8)
    comm.Barrier()
    if rank in sending:
        peer = sending[rank]
        # The first message sets up a connection.
        _send(comm, peer, buffer[:1], 1)
        first = _send(comm, peer, buffer, 1)
        messages, repeats = affordable_messages(first)
        comm.send((messages, repeats), peer)
        seconds = statistics.median([_send(comm, peer, buffer, messages) for _ in range(repeats)] or [first])
        return {"source": rank, "target": peer, "bandwidth": messages * size / seconds}
    if rank in receiving:
        peer = receiving[rank]
        _receive(comm, peer, buffer[:1], 1)
        _receive(comm, peer, buffer, 1)
        messages, repeats = comm.recv(source=peer)
        for _ in range(repeats):
            _receive(comm, peer, buffer, messages)
    return None


def affordable_messages(seconds: float) -> tuple[int, int]:
    """How many messages at once, and how often, if one takes ``seconds``; 0 times if there is time for no more."""
    messages = min(_MESSAGES, max(1, int(_SECONDS / (_REPEATS * seconds))))
    return messages, min(_REPEATS, int(_SECONDS / (messages * seconds)))


def _send(comm: MPI.Comm, peer: int, buffer: np.ndarray[Any, Any], messages: int) -> float:
    done = np.zeros(1)
    start = time.perf_counter()
    for request in [comm.Isend(buffer, peer) for _ in range(messages)]:
        request.Wait()
    comm.Recv(done, peer)
    return time.perf_counter() - start


def _receive(comm: MPI.Comm, peer: int, buffer: np.ndarray[Any, Any], messages: int) -> None:
    for _ in range(messages):
        comm.Recv(buffer, peer)
    comm.Send(np.zeros(1), peer)


def best(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A flow's best bandwidth over all passes, and the share by which its median pass was below (``spread``)."""
    bandwidths = [flow["bandwidth"] for flow in measured]
    return {
        **measured[0],
        "bandwidth": max(bandwidths),
        "spread": 1 - statistics.median(bandwidths) / max(bandwidths),
    }


def measure_all(comm: MPI.Comm, rounds: list[list[tuple[int, int]]], size: int) -> list[dict[str, Any]]:
    """The flows of all rounds on rank 0; an empty list on the others. Collective."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for _ in range(_PASSES):
        for number, pairs in enumerate(rounds):
            for flow in comm.gather(measure(comm, pairs, size)) or []:
                if flow:
                    found.setdefault((number, flow["source"]), []).append({"round": number, **flow})
    return [best(flows) for flows in found.values()]


def main(out: str, rounds: str, size: str) -> None:
    device = choose_adapter()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    devices = comm.gather(device)
    schedule = [[(source, target) for source, target in pairs] for pairs in json.loads(Path(rounds).read_text())]
    flows = measure_all(comm, schedule, int(size))
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"devices": devices, "flows": flows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
