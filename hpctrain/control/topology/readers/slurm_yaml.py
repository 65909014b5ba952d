"""Slurm's ``topology.yaml`` (25.05 and later): named topologies, of which the cluster's default one is read.

Source: https://slurm.schedmd.com/topology.yaml.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel

from hpctrain.common.cluster.host_list import expand_hosts, expand_names
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Location, read_document, validate
from hpctrain.control.topology.readers.slurm import checked, not_valid
from hpctrain.control.topology.records import Record, Remark, SwitchGroup

_KIND, _HINT = "topology.yaml", "see man topology.yaml"


class _Part(BaseModel):
    # Names may be numbers.
    model_config = ConfigDict(coerce_numbers_to_str=True, extra="forbid")


class _Group(_Part):
    """A switch or a block."""

    switch: str = ""
    block: str = ""
    children: str = ""
    nodes: str = ""


class _Groups(_Part):
    switches: tuple[_Group, ...] = ()
    blocks: tuple[_Group, ...] = ()
    block_sizes: Any = None


class _Topology(_Part):
    """One topology. Kinds other than ``tree`` and ``block`` describe no switches."""

    topology: str
    cluster_default: bool = False
    tree: _Groups | None = None
    block: _Groups | None = None
    flat: Any = None
    ring: Any = None
    torus3d: Any = None


class _Topologies(RootModel[tuple[_Topology, ...]]):
    pass


def read(text: str, where: str) -> Iterator[Record]:
    """The switches or blocks of the default topology, or of the first one where none is the default.

    Args:
        where: the file's name, for messages.

    Raises:
        HpctrainError: the text is no topology.yaml, its default topology has no switches and no blocks, or it names
            something that it does not define; with the line.
    """
    document = read_document(text, Path(where), _KIND, is_list=True)
    topologies = validate(document.values, _Topologies, document.where, _KIND, _HINT).root
    number = next((place for place, topology in enumerate(topologies) if topology.cluster_default), 0)
    taken = topologies[number] if topologies else None
    kind, key = ("tree", "switches") if taken and taken.tree else ("block", "blocks")
    listed: tuple[_Group, ...] = getattr(getattr(taken, kind, None), key, ())
    if taken is None or not listed:
        raise HpctrainError(
            "HT-topology-no-groups",
            "{where}: its default topology is no tree and no blocks",
            "there is nothing to place ranks by: give the output of ibnetdiscover instead",
            where=where,
        )
    if len(topologies) > 1:
        names = ", ".join(topology.topology for topology in topologies)
        yield Remark(text=f"of several topologies ({names}) {taken.topology} is taken, the default one", where=where)
    groups = [_group(group, (number, kind, key, place), document.where) for place, group in enumerate(listed)]
    yield from checked(groups, where)


def _group(group: _Group, at: Location, where: Callable[[Location], str]) -> SwitchGroup:
    name = group.switch or group.block
    if not name:
        raise not_valid(where(at), "a switch or a block without a name")
    if group.children and group.nodes:
        raise not_valid(where(at), f"{name!r} has both switches and hosts, which Slurm refuses")
    children, nodes = f"{where((*at, 'children'))}: children", f"{where((*at, 'nodes'))}: nodes"
    return SwitchGroup(
        name=name,
        where=where(at),
        switches=expand_names(group.children, children) if group.children else (),
        hosts=expand_hosts(group.nodes, nodes) if group.nodes else (),
    )
