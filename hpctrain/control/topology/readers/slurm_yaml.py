"""Slurm's ``topology.yaml`` (25.05 and later): named topologies, each a tree, blocks or flat.

Source: https://slurm.schedmd.com/topology.yaml.html.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, RootModel

from hpctrain.common.cluster.host_list import expand_hosts, expand_names
from hpctrain.common.files.checked_yaml import Location, read_document, validate
from hpctrain.control.topology.readers.slurm import (
    LEAVES_ONLY,
    Choice,
    Topology,
    aggregate,
    check_groups,
    choose,
    not_valid,
)
from hpctrain.control.topology.records import Record, SwitchGroup

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
    # A single size may stand without a list.
    block_sizes: Annotated[
        tuple[int, ...], BeforeValidator(lambda sizes: [sizes] if type(sizes) is int else sizes)
    ] = ()
    blocks: tuple[_Block, ...]


class _Topology(_Part):
    """One topology. Kinds other than ``tree`` and ``block`` describe no switches."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
    flat: object = None
    ring: object = None
    torus3d: object = None


class _Topologies(RootModel[tuple[_Topology, ...]]):
    pass


def read(text: str, where: str, choice: Choice = Choice()) -> Iterator[Record]:
    """The switches or blocks of one of the topologies, see :func:`hpctrain.control.topology.readers.slurm.choose`.

    Args:
        where: the file's name, for messages.
        choice: selects one of the file's topologies.

    Raises:
        HpctrainError: the text is no topology.yaml, has only topologies without switches, or names something that it
            does not define; with the line.
    """
    document = read_document(text, Path(where), _KIND, is_list=True)
    topologies = []
    for number, topology in enumerate(validate(document.values, _Topologies, document.where, _KIND, _HINT).root):
        groups: list[SwitchGroup] = []
        if topology.tree:
            groups = list(_tree(topology.tree, (number, "tree"), document.where))
        elif topology.block:
            groups = list(_blocks(topology.block, (number, "block"), document.where))
        topologies.append(Topology(name=topology.topology, groups=groups, default=topology.cluster_default))
    taken, remarks = choose(topologies, choice, where)
    yield from remarks
    yield from check_groups(taken.groups, where)


def _tree(tree: _Tree, at: Location, where: Callable[[Location], str]) -> Iterator[SwitchGroup]:
    for number, switch in enumerate(tree.switches):
        here = (*at, "switches", number)
        if switch.children and switch.nodes:
            raise not_valid(where(here), f"{switch.switch!r} has both switches and hosts", LEAVES_ONLY)
        yield SwitchGroup(
            name=switch.switch,
            where=where(here),
            switches=expand_names(switch.children, f"{where((*here, 'children'))}: children")
            if switch.children
            else (),
            hosts=expand_hosts(switch.nodes, f"{where((*here, 'nodes'))}: nodes") if switch.nodes else (),
        )


def _blocks(body: _Blocks, at: Location, where: Callable[[Location], str]) -> Iterator[SwitchGroup]:
    blocks = []
    for number, block in enumerate(body.blocks):
        here = (*at, "blocks", number)
        hosts = expand_hosts(block.nodes, f"{where((*here, 'nodes'))}: nodes") if block.nodes else ()
        blocks.append(SwitchGroup(name=block.block, where=where(here), hosts=hosts))
    yield from blocks
    yield from aggregate(blocks, body.block_sizes, where((*at, "block_sizes")))
