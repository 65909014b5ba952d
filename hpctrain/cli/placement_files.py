"""``hpctrain topology place --write KIND=FILE``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.common.cluster import launch_files
from hpctrain.common.cluster.node_map import NodeMap, slots
from hpctrain.common.errors import HpctrainError, nearest

_HOSTFILES = {
    "hostfile": launch_files.open_mpi_hostfile,
    "hydra": launch_files.hydra_hostfile,
    "slurm": launch_files.slurm_hostfile,
}
# The kinds of files that need a node map, and why.
_NAMES = {
    "rankfile": "a rankfile names cores",
    "cpu-bind": "masks of CPUs name cores",
    "environment": "the environment names GPUs and adapters",
}
KINDS = (*_HOSTFILES, *_NAMES)


def parse_write(text: str) -> tuple[str, Path]:
    """The kind and the file of one ``--write`` option.

    Raises:
        HpctrainError: there is no such kind, or no file.
    """
    kind, separator, file = text.partition("=")
    if kind not in KINDS:
        raise HpctrainError(
            "HT-format-unknown", "--write {text}: no such kind of file", nearest(kind, KINDS), text=text
        )
    if not separator or not file:
        raise HpctrainError(
            "HT-option-bad-value",
            "--write {text}: no file to write",
            f"for example --write {kind}=job.{kind}",
            text=text,
        )
    return kind, Path(file)


def placement_file(kind: str, order: Sequence[str], ranks: int, node_map: NodeMap | None, *, rails: bool) -> str:
    """The text of a file of one of :data:`KINDS`.

    Args:
        order: the hosts, in the order of their ranks.
        ranks: the number of ranks on each host.
        node_map: the GPUs, adapters and cores of each host, which are identical.
        rails: whether each adapter of a host is on a leaf switch of its own.

    Raises:
        HpctrainError: the kind needs a node map and there is none, or it lacks what the file names.
    """
    if kind in _HOSTFILES:
        return _HOSTFILES[kind]((host, range(ranks)) for host in order)
    if node_map is None:
        raise HpctrainError(
            "HT-not-in-fabric",
            "{names}, which the fabric does not know",
            "add --node FILE, or --node live",
            names=_NAMES[kind],
        )
    places = slots(node_map, ranks)
    placed = [(host, places) for host in order]
    if kind == "rankfile":
        _require_first_cores(node_map)
        logical = launch_files.logical_cores([each.cores for each in node_map.numa_nodes])
        return launch_files.open_mpi_rankfile(placed, logical)
    if kind == "cpu-bind":
        return launch_files.cpu_bind(placed) + "\n"
    return _assignments({**launch_files.network_variables(rails=rails), **launch_files.host_variables(places)})


def _require_first_cores(node_map: NodeMap) -> None:
    """Refuse a node map that may lack cores which hwloc counts before the listed ones."""
    cores = sorted(core for node in node_map.numa_nodes for core in node.cores)
    if not node_map.whole and cores != list(range(len(cores))):
        raise HpctrainError(
            "HT-cores-not-known",
            "a rankfile counts all cores of a host, and the node map lists only those near its devices",
            "give --node a file of lstopo --of xml; or write cpu-bind, which names CPUs by their own numbers",
        )


def _assignments(variables: Mapping[str, str]) -> str:
    """Assignments that a shell can read, a line each."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
