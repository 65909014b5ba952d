"""Slurm's ``topology.yaml`` (25.05 and later): named topologies, each a tree, blocks or flat.

Source: https://slurm.schedmd.com/topology.yaml.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from hpctrain.common.cluster.host_list import expand_hosts, expand_names
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.bounded_yaml import BoundedLoader
from hpctrain.control.topology.choice import Choice, Topology, choose
from hpctrain.control.topology.readers.slurm import aggregate, check_groups
from hpctrain.control.topology.records import Record, Remark, SwitchGroup

_KINDS = ("tree", "block", "flat")
# Other topologies of Slurm, which do not describe switches.
_PASSED_OVER = ("ring", "torus3d")

Keys = dict[str, yaml.Node]


class _SlurmLoader(BoundedLoader):
    """Composes a plain tree of nodes: no aliases, which can be circular."""

    # Topologies, their switches, and the keys of these need fewer levels: deeper nesting means another file.
    deepest = 10

    def refusal(self, event: Any) -> str | None:
        return "an alias has no place in a topology" if isinstance(event, yaml.AliasEvent) else None


def read(text: str, where: str, choice: Choice = Choice()) -> Iterator[Record]:
    """The switches or blocks of one of the topologies, see :func:`hpctrain.control.topology.choice.choose`.

    Args:
        where: the file's name, for messages.
        choice: selects one of the file's topologies.

    Raises:
        HpctrainError: the text is no topology.yaml, has only flat topologies, or names something that it does not
            define; with the line.
    """
    topologies: list[Topology] = []
    for node in _items(_compose(text, where), where, "topologies"):
        keys = _keys(node, where, "a topology")
        kind = _kind(keys, where)
        groups: list[SwitchGroup] = []
        if kind in _PASSED_OVER:
            yield Remark(text=f"a topology of kind {kind} is ignored", where=_place(node, where))
        elif kind != "flat":
            body = _keys(keys[kind], where, kind)
            groups = list((_tree if kind == "tree" else _blocks)(body, keys[kind], where))
        name = _text(keys, "topology", node, where)
        topologies.append(Topology(name=name, groups=groups, default=_is_default(keys), kind=kind))
    taken, remarks = choose(topologies, choice, where)
    yield from remarks
    yield from check_groups(taken.groups, where)


def _compose(text: str, where: str) -> yaml.Node:
    try:
        root = yaml.compose(text, _SlurmLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise HpctrainError(
            "HT-file-not-yaml",
            "{where}: not YAML: {problem}",
            "expected a Slurm topology.yaml",
            where=place,
            problem=problem,
        ) from error
    if root is None:
        raise HpctrainError(
            "HT-slurm-topology-not-valid", "{where}: empty", "expected a Slurm topology.yaml", where=where
        )
    return root


def _place(node: yaml.Node, where: str) -> str:
    return f"{where}:{node.start_mark.line + 1}"


def _items(node: yaml.Node, where: str, what: str) -> list[yaml.Node]:
    if not isinstance(node, yaml.SequenceNode):
        raise HpctrainError(
            "HT-slurm-topology-not-valid",
            "{where}: expected a list of {items}",
            "see man topology.yaml",
            where=_place(node, where),
            items=what,
        )
    items: list[yaml.Node] = node.value
    return items


def _keys(node: yaml.Node, where: str, what: str) -> Keys:
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        raise HpctrainError(
            "HT-slurm-topology-not-valid",
            "{where}: expected the keys of {item}",
            "see man topology.yaml",
            where=_place(node, where),
            item=what,
        )
    keys: Keys = {}
    for key, value in node.value:
        if key.value in keys:
            raise HpctrainError(
                "HT-slurm-topology-not-valid", "{where}: {key} appears twice", where=_place(key, where), key=key.value
            )
        keys[key.value] = value
    return keys


def _kind(keys: Keys, where: str) -> str:
    found = [key for key in keys if key not in ("topology", "cluster_default")]
    place = _place(next(iter(keys.values())), where) if keys else where
    if "topology" not in keys or len(found) != 1:
        raise HpctrainError(
            "HT-slurm-topology-not-valid",
            "{where}: a topology has its name and exactly one of {kinds}",
            "see man topology.yaml",
            where=place,
            kinds=", ".join(_KINDS),
        )
    if found[0] not in (*_KINDS, *_PASSED_OVER):
        raise HpctrainError(
            "HT-slurm-topology-not-valid",
            "{where}: {kind!r} is not a kind of topology",
            nearest(found[0], _KINDS),
            where=place,
            kind=found[0],
        )
    return found[0]


def _is_default(keys: Keys) -> bool:
    node = keys.get("cluster_default")
    return isinstance(node, yaml.ScalarNode) and node.value.lower() in ("true", "yes", "on")


def _tree(body: Keys, node: yaml.Node, where: str) -> Iterator[SwitchGroup]:
    for item in _items(_value(body, "switches", node, where), where, "switches"):
        keys = _keys(item, where, "a switch")
        place = _place(item, where)
        switches, hosts = _names(keys, "children", where), _names(keys, "nodes", where)
        if switches and hosts:
            raise HpctrainError(
                "HT-slurm-topology-not-valid",
                "{where}: a switch has children or nodes, not both",
                "see man topology.yaml",
                where=place,
            )
        yield SwitchGroup(name=_text(keys, "switch", item, where), where=place, switches=switches, hosts=hosts)


def _blocks(body: Keys, node: yaml.Node, where: str) -> Iterator[SwitchGroup]:
    blocks = []
    for item in _items(_value(body, "blocks", node, where), where, "blocks"):
        keys = _keys(item, where, "a block")
        name = _text(keys, "block", item, where)
        blocks.append(SwitchGroup(name=name, where=_place(item, where), hosts=_names(keys, "nodes", where)))
    listed = body.get("block_sizes")
    # A single size may stand without a list.
    items = [] if listed is None else [listed]
    if listed is not None and not isinstance(listed, yaml.ScalarNode):
        items = _items(listed, where, "block sizes")
    sizes = tuple(_size(item, where) for item in items)
    yield from (replace(block, block_sizes=sizes) for block in blocks)
    if listed is not None:
        yield from aggregate(blocks, sizes, _place(listed, where))


def _size(node: yaml.Node, where: str) -> int:
    if not isinstance(node, yaml.ScalarNode) or not node.value.isdecimal() or len(node.value) > 9:
        raise HpctrainError(
            "HT-slurm-topology-not-valid", "{where}: block_sizes: expected whole numbers", where=_place(node, where)
        )
    return int(node.value)


def _names(keys: Keys, key: str, where: str) -> tuple[str, ...]:
    if key not in keys:
        return ()
    text = _text(keys, key, keys[key], where)
    if not text:
        return ()
    return (expand_hosts if key == "nodes" else expand_names)(text, f"{_place(keys[key], where)}: {key}")


def _text(keys: Keys, key: str, parent: yaml.Node, where: str) -> str:
    node = _value(keys, key, parent, where)
    if not isinstance(node, yaml.ScalarNode):
        raise HpctrainError(
            "HT-slurm-topology-not-valid", "{where}: {key}: expected a string", where=_place(node, where), key=key
        )
    text: str = node.value
    return text


def _value(keys: Keys, key: str, parent: yaml.Node, where: str) -> yaml.Node:
    if key not in keys:
        hint = f"it has: {', '.join(map(repr, keys))}" if keys else ""
        raise HpctrainError(
            "HT-slurm-topology-not-valid", "{where}: {key!r} is missing", hint, where=_place(parent, where), key=key
        )
    return keys[key]
