"""Binds a rank to the GPUs, adapters and cores that its plan gives it, as far as these fit the machine.

A node map may describe another machine, or this one before a change. What does not fit is left out with a warning: a
rank without a restriction is slower at worst, and one restricted to something that is missing does not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.common.cluster.cores import allowed_cpus, cpus_of_node, numa_nodes, threads_of
from hpctrain.common.cluster.gpus import own_gpu, usable_gpus
from hpctrain.common.cluster.interfaces import ADAPTERS, all_ports
from hpctrain.common.cluster.launch_files import host_variables, slot_variables
from hpctrain.common.cluster.node_map import Slot, share
from hpctrain.common.run.plan import Plan

_RESTRICTIONS = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_HINT = "give --node a node map of that host, or leave it out"


def bind_rank(plan: Plan, rank: int, root: Path = Path("/")) -> None:
    """Set the variables and the cores of a rank. Variables that the user has set stay.

    Args:
        root: the folder that holds sys and proc.
    """
    if plan.start.share_gpus:
        # Before anything has looked at the GPUs: a framework that counts its processes finds one GPU, its own.
        own = own_gpu(rank, os.environ.get("CUDA_VISIBLE_DEVICES"), usable_gpus({}))
        if own is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = own
    if not any(host.places for host in plan.hosts):
        return
    host, local = [(host, local) for host in plan.hosts for local in range(len(host.places))][rank]
    slot = host.places[local]
    variables = {**host_variables(host.places), **slot_variables(slot)}
    if not all(name in os.environ for name in _RESTRICTIONS if name in variables):
        devices = list(dict.fromkeys(device for place in host.places for device in place.devices))
        if missing := missing_adapter(devices, root / ADAPTERS.relative_to("/")):
            text = f"adapters are left to NCCL and UCX: {missing} of the node map is not up here"
            _warn(rank, host.host, text)
            variables = {name: value for name, value in variables.items() if name not in _RESTRICTIONS}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if slot.cores:
        unfit, cores = unfit_cores(host.places, local, root), slot.cores
    else:
        unfit, cores = shared_cores(host.places, local, root)
    if unfit:
        _warn(rank, host.host, f"it is bound to no cores: {unfit}")
    elif cores:
        os.sched_setaffinity(0, cores)


def missing_adapter(devices: Sequence[str], folder: Path) -> str:
    """The first of these ports that is not up here; empty if all are.

    Args:
        devices: names as in ``mlx5_0``, or ``mlx5_0:2`` for a port that is not the first.
        folder: the kernel's folder of RDMA devices.
    """
    up = {f"{port.adapter.name}:{port.number}" for port in all_ports(folder) if port.active}
    wanted = [device if ":" in device else f"{device}:1" for device in devices]
    return next((name for name in wanted if name not in up), "")


def unfit_cores(places: Sequence[Slot], local: int, root: Path) -> str:
    """Why a rank must not be bound to the cores that its plan gives it; empty if it may."""
    slot = places[local]
    if missing := sorted(set(slot.cores) - allowed_cpus(root)):
        return f"it may not use core {missing[0]} of the node map"
    of_node = cpus_of_node(slot.numa, root) if slot.numa is not None else None
    if of_node is not None and not set(slot.cores).issubset(of_node):
        return f"its cores are not all of NUMA node {slot.numa} here"
    owner = {core: rank for rank, place in enumerate(places) for core in place.cores}
    for core in slot.cores:
        for thread in sorted(threads_of(core, root)):
            if owner.get(thread, local) != local:
                return f"core {core} is a hardware thread of core {thread} here, which another rank has"
    return ""


def shared_cores(places: Sequence[Slot], local: int, root: Path) -> tuple[str, tuple[int, ...]]:
    """Why a rank whose plan names no cores gets none, or empty, and its share of the cores of its NUMA node.

    The node's ranks for which the plan names no cores share those that this process may use and no other rank is given.
    """
    numa = places[local].numa
    if numa is None:
        return "", ()
    found = next((node.cores for node in numa_nodes(root) if node.index == numa), ())
    given = {core for place in places for core in place.cores}
    free = [core for core in found if given.isdisjoint(threads_of(core, root))]
    ranks = [rank for rank, place in enumerate(places) if place.numa == numa and not place.cores]
    if len(free) < len(ranks):
        return f"{len(ranks)} ranks for the {len(free)} cores of NUMA node {numa} that they may use", ()
    return "", tuple(share(free, ranks.index(local), len(ranks)))


def _warn(rank: int, host: str, text: str) -> None:
    print(f"hpctrain: warning: rank {rank} on {host}: {text}; {_HINT}", file=sys.stderr)
