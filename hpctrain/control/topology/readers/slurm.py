"""Slurm's ``topology.conf`` and the output of ``scontrol show topology``: one switch or block a line.

Source: https://slurm.schedmd.com/topology.conf.html. ``scontrol`` prints the same keys in the same form and adds
``Level``, ``BlockIndex``, ``BlockSize`` and, of blocks of blocks, ``AggregatedBlock``.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Sequence
from itertools import chain

from hpctrain.common.cluster.host_list import expand_hosts, expand_names
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.control.topology.records import Record, Remark, SwitchGroup

# The further keys that a line may have, by its first key.
_LINES = {
    "SwitchName": ("Switches", "Nodes", "LinkSpeed", "Level"),
    "BlockName": ("Nodes", "BlockIndex", "BlockSize"),
    "AggregatedBlock": ("Nodes", "BlockIndex", "BlockSize"),
    "BlockSizes": (),
}
_SPELLING = {key.lower(): key for first, further in _LINES.items() for key in (first, *further)}
_KEY = "|".join(_SPELLING)
# A key without a value is followed by the next key.
_PAIR = re.compile(rf"\s*([A-Za-z]+)\s*=(?:\s*(?:\"([^\"]*)\"|(?!(?i:{_KEY})\s*=)([^\s\"]+)))?")

_EXPECTED = "expected SwitchName=… with Switches=… or Nodes=…, or BlockName=… with Nodes=…, or BlockSizes=…"

Line = tuple[dict[str, str], str]


def _not_valid(where: str, problem: str, hint: str = "") -> HpctrainError:
    return HpctrainError("HT-slurm-topology-not-valid", "{where}: {problem}", hint, where=where, problem=problem)


def _cut_off(where: str, problem: str) -> HpctrainError:
    hint = "write it again: scontrol show topology"
    return HpctrainError("HT-slurm-topology-cut-off", "{where}: {problem}", hint, where=where, problem=problem)


def read(text: str, where: str) -> Iterator[Record]:
    """The switches or blocks of a text, hosts at the leaves.

    Slurm reads switches or blocks, depending on its TopologyPlugin. Of a text with both the switches are taken, because
    they describe the network between blocks too.

    Args:
        text: a topology.conf (tree or block), or the output of ``scontrol show topology``.
        where: the file's name, for messages.

    Raises:
        HpctrainError: the text has another format, or names something that it does not define; with the line.
    """
    lines = list(_lines(text, where))
    if any({"Level", "BlockIndex"} & pairs.keys() for pairs, _ in lines) and not text.endswith("\n"):
        last = text.rpartition("\n")[2].strip()[:60]
        raise _cut_off(lines[-1][1], f"the text is cut off in its last line: {last!r}")
    switches = [_switch(pairs, place) for pairs, place in lines if "SwitchName" in pairs]
    # Blocks of blocks are left out: neighbours are beside each other by their names.
    blocks = [
        SwitchGroup(name=pairs["BlockName"], where=place, hosts=_names(pairs, "Nodes", place))
        for pairs, place in lines
        if "BlockName" in pairs
    ]
    return _checked(switches or blocks, where)


def _checked(groups: Sequence[SwitchGroup], where: str) -> Iterator[Record]:
    """The groups, once they are known to form trees with hosts; a group without hosts and switches gets a remark.

    Raises:
        HpctrainError: no hosts, a name that is used twice or not defined, or a switch that is below itself.
    """
    by_name: dict[str, SwitchGroup] = {}
    for group in groups:
        if (first := by_name.setdefault(group.name, group)) is not group:
            raise _not_valid(group.where, f"{group.name!r} is defined a second time, after {first.where}")
    for group in groups:
        for child in group.switches:
            if child not in by_name:
                hint = nearest(child, by_name) if len(by_name) <= 50 else "is the text complete?"
                raise _not_valid(group.where, f"{group.name!r} contains {child!r}, which is not defined", hint)
    try:
        graphlib.TopologicalSorter({group.name: group.switches for group in groups}).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        raise _not_valid(by_name[circle[0]].where, f"a circle in the tree: {' - '.join(circle)}") from error
    if not any(group.hosts for group in groups):
        raise _not_valid(where, "no switch and no block with hosts", _EXPECTED)
    empty = (group for group in groups if not (group.switches or group.hosts))
    return chain(groups, (Remark(text=f"{group.name!r} has no hosts", where=group.where) for group in empty))


def _lines(text: str, where: str) -> Iterator[Line]:
    """The pairs of each line, keys as Slurm spells them, and its place; comments left out, continued lines joined."""
    continued, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].rstrip()
        start = start if continued else number
        if line.endswith("\\"):
            continued += line[:-1] + " "
            continue
        line, continued = continued + line, ""
        if line.strip():
            yield _pairs(line, f"{where}:{start}"), f"{where}:{start}"
    if continued:
        raise _cut_off(f"{where}:{start}", "the text ends within a line that is continued")


def _pairs(line: str, place: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    end = 0
    while match := _PAIR.match(line, end):
        key, end = _SPELLING.get(match[1].lower(), match[1]), match.end()
        if key in pairs:
            raise _not_valid(place, f"{match[1]} appears twice")
        pairs[key] = match[2] or match[3] or ""
    first = next(iter(pairs), "")
    if line[end:].strip() or first not in _LINES or not pairs[first]:
        raise _not_valid(place, f"not a line of a Slurm topology: {line.strip()[:60]!r}", _EXPECTED)
    for key in pairs:
        if key != first and key not in _LINES[first]:
            raise _not_valid(place, f"{first} has no {key!r}", nearest(key, _LINES[first]) if _LINES[first] else "")
    return pairs


def _switch(pairs: dict[str, str], place: str) -> SwitchGroup:
    switches, hosts = _names(pairs, "Switches", place), _names(pairs, "Nodes", place)
    if not switches and pairs.get("Level", "0") != "0":
        problem = f"the line of {pairs['SwitchName']!r} is cut off before its Switches, by SLURM_TOPO_LEN"
        raise _cut_off(place, problem)
    if switches and hosts and "Level" not in pairs:
        raise _not_valid(
            place, f"{pairs['SwitchName']!r} has both switches and hosts", "Slurm has hosts at the leaves only"
        )
    return SwitchGroup(
        name=pairs["SwitchName"],
        where=place,
        switches=switches,
        # For a switch above others, scontrol also prints all hosts below it.
        hosts=() if switches else hosts,
    )


def _names(pairs: dict[str, str], key: str, place: str) -> tuple[str, ...]:
    text = pairs.get(key)
    if not text:
        return ()
    return (expand_hosts if key == "Nodes" else expand_names)(text, f"{place}: {key}")
