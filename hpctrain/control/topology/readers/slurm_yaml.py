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


class _Switch(_Part):
    switch: str
    children: str = ""
    nodes: str = ""


class _Tree(_Part):
    switches: tuple[_Switch, ...]


class _Block(_Part):
    block: str
    nodes: str = ""


class _Blocks(_Part):
    block_sizes: Any = None
    blocks: tuple[_Block, ...]


class _Topology(_Part):
    """One topology. Kinds other than ``tree`` and ``block`` describe no switches."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
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
    number = next((place for place, each in enumerate(topologies) if each.cluster_default), 0)
    taken = topologies[number] if topologies else None
    groups: list[SwitchGroup] = []
    if taken and taken.tree:
        groups = list(_switches(taken.tree, (number, "tree"), document.where))
    elif taken and taken.block:
        groups = list(_blocks(taken.block, (number, "block"), document.where))
    if taken is None or not groups:
        raise HpctrainError(
            "HT-topology-no-groups",
            "{where}: its default topology is no tree and no blocks",
            "there is nothing to place ranks by: give the output of ibnetdiscover instead",
            where=where,
        )
    if len(topologies) > 1:
        names = ", ".join(each.topology for each in topologies)
        yield Remark(text=f"of several topologies ({names}) {taken.topology} is taken, the default one", where=where)
    yield from checked(groups, where)


def _switches(tree: _Tree, at: Location, where: Callable[[Location], str]) -> Iterator[SwitchGroup]:
    for number, switch in enumerate(tree.switches):
        here = (*at, "switches", number)
        if switch.children and switch.nodes:
            raise not_valid(where(here), f"{switch.switch!r} has both switches and hosts, which Slurm refuses")
        children, nodes = f"{where((*here, 'children'))}: children", f"{where((*here, 'nodes'))}: nodes"
        yield SwitchGroup(
            name=switch.switch,
            where=where(here),
            switches=expand_names(switch.children, children) if switch.children else (),
            hosts=expand_hosts(switch.nodes, nodes) if switch.nodes else (),
        )


def _blocks(body: _Blocks, at: Location, where: Callable[[Location], str]) -> Iterator[SwitchGroup]:
    for number, block in enumerate(body.blocks):
        here = (*at, "blocks", number)
        hosts = expand_hosts(block.nodes, f"{where((*here, 'nodes'))}: nodes") if block.nodes else ()
        yield SwitchGroup(name=block.block, where=where(here), hosts=hosts)
