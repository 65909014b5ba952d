"""The hosts of a run and their order: what the user says, what Slurm says, and what the fabric makes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster.host_list import expand_hosts
from hpctrain.errors import HpctrainError
from hpctrain.launch.fabric import FLAT, given_fabric, known_fabric
from hpctrain.plan import HostOptions
from hpctrain.planning.hosts import Hosts, place_hosts
from hpctrain.topology.cabling import counted
from hpctrain.topology.fabric import Fabric
from hpctrain.topology.names import is_guid
from hpctrain.topology.node_file import read_node_map
from hpctrain.topology.node_map import NodeMap

LIVE = "live"

_ALLOCATED = "SLURM_JOB_NODELIST"


def arrange(
    options: HostOptions,
    this_host: str,
    ranks: int | None,
    environment: Mapping[str, str] = os.environ,
    *,
    whole_fabric: bool = False,
) -> tuple[Hosts, tuple[str, ...]]:
    """The hosts in the order of the plan with their slots, and warnings.

    Args:
        options: of the command line. Without hosts in it they are those of the Slurm allocation.
        this_host: taken where no other is named.
        ranks: of all hosts together; by default one a GPU, or one a host where no node map tells the GPUs.
        environment: this process's.
        whole_fabric: take all hosts of a given fabric, rather than refuse it, where nothing names those of the run.

    Raises:
        HpctrainError: files or lists that cannot be read, hosts that are not there, or ranks that do not fit.
    """
    given = given_fabric(options.fabric, options.routes)
    if given and not (whole_fabric or options.hosts is not None or environment.get(_ALLOCATED)):
        raise HpctrainError(
            f"--fabric {options.fabric} has {len(given.hosts)} hosts, and nothing says which of them are yours",
            "name them with --hosts, or start inside a Slurm allocation",
        )
    names, warnings = _names(options, given, this_host, environment)
    node_map = node_map_of(options.node) if options.node is not None else None
    if given:
        fabric, known_from = given, str(options.fabric)
    else:
        fabric, known_from = known_fabric(names, environment)
        warnings += fabric.warnings
    each = len(node_map.gpus) if node_map and node_map.gpus else 1
    hosts = place_hosts(
        names,
        len(names) * each if ranks is None else ranks,
        fabric,
        known_from=known_from,
        node_map=node_map,
        interface=options.interface,
    )
    warnings += node_map.warnings if node_map else ()
    if known_from == FLAT and len(names) > 1:
        warnings += ("no fabric is known, so the hosts stay in the order given: --fabric FILE names one",)
    return hosts, warnings


def node_map_of(node: str) -> NodeMap:
    """The node map that ``--node`` names: a file's, or this machine's own.

    Raises:
        HpctrainError: it cannot be read.
    """
    if node != LIVE:
        return read_node_map(Path(node))
    # NVML's Python half, which is not needed to read a file.
    from hpctrain.topology.live import this_node

    return this_node()


def _names(
    options: HostOptions, given: Fabric | None, this_host: str, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts of the run in the order in which they are named, and warnings."""
    warnings: tuple[str, ...] = ()
    if options.hosts is not None:
        names, where = expand_hosts(options.hosts, "--hosts"), "--hosts"
    elif allocated := environment.get(_ALLOCATED):
        names, where = expand_hosts(allocated, _ALLOCATED), "the allocation"
    elif given:
        where = str(options.fabric)
        names = tuple(host for host in given.hosts if not is_guid(host))
        if nameless := [host for host in given.hosts if is_guid(host)]:
            warnings = (counted(f"hosts of {where} without a name, which no run can reach, left out", nameless),)
        if not names:
            raise HpctrainError(f"{where}: none of its {len(nameless)} hosts has a name", "name yours with --hosts")
    else:
        names, where = (this_host,), "this machine"
    if options.nodes is None:
        return names, warnings
    if not 1 <= options.nodes <= len(names):
        raise HpctrainError(
            f"--nodes {options.nodes}: {where} has {len(names)} host{'' if len(names) == 1 else 's'}",
            "name more with --hosts, or give their --fabric",
        )
    return names[: options.nodes], warnings
