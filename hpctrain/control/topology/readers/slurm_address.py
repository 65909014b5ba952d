"""Collected values of ``SLURM_TOPOLOGY_ADDR`` and ``SLURM_TOPOLOGY_ADDR_PATTERN`` in a job's tasks.

Each task has a line: ``core.s1.n1 switch.switch.node``; the pattern is optional if no host's name has a dot. Lines of
tasks on one host are equal, so the number of tasks does not matter. Source: man srun, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hpctrain.common.cluster.host_list import expand_hosts, expand_names
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.readers.slurm import check_groups
from hpctrain.control.topology.records import Record, SwitchGroup

_LEVELS = ("switch", "block")
_HINT = "expected lines like: core.s1.n1 switch.switch.node"


def read(text: str, where: str) -> Iterator[Record]:
    """The switches that the addresses name, hosts at the leaves.

    Args:
        text: the addresses, each with its pattern or without.
        where: the name of their source in messages.

    Raises:
        HpctrainError: a line is not an address, or no line names a switch; with the line.
    """
    places: dict[str, str] = {}
    below: dict[str, dict[str, None]] = {}
    hosts: dict[str, dict[str, None]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        levels, host = _address(line.split(), place)
        for upper, lower in pairwise(levels):
            for switch in upper:
                below.setdefault(switch, {}).update(dict.fromkeys(lower))
        for switch in (switch for level in levels for switch in level):
            places.setdefault(switch, place)
        for switch in levels[-1] if levels else ():
            hosts.setdefault(switch, {})[host] = None
    if not places:
        raise HpctrainError("HT-slurm-address-no-switch", "{where}: no address with a switch in it", _HINT, where=where)
    groups = [
        SwitchGroup(name=name, where=place, switches=tuple(below.get(name, ())), hosts=tuple(hosts.get(name, ())))
        for name, place in places.items()
    ]
    return check_groups(groups, where)


def _address(words: list[str], place: str) -> tuple[list[tuple[str, ...]], str]:
    """The switches of each level, from the top, and the host."""
    if len(words) > 2:
        raise HpctrainError(
            "HT-slurm-address-bad-line",
            "{where}: {line!r} is not one address with its pattern",
            _HINT,
            where=place,
            line=" ".join(words)[:60],
        )
    address = words[0]
    kinds = words[1].split(".") if len(words) == 2 else [""] * (address.count(".") + 1)
    # With a pattern, the text after the switches is the host, dots included.
    parts = address.split(".", maxsplit=len(kinds) - 1)
    if len(parts) != len(kinds) or (len(words) == 2 and kinds[-1] != "node"):
        raise HpctrainError(
            "HT-slurm-address-not-by-pattern",
            "{where}: {address!r} does not follow its pattern {pattern!r}",
            _HINT,
            where=place,
            address=address[:60],
            pattern=words[-1][:60],
        )
    if others := {*kinds[:-1]} - {"", *_LEVELS}:
        # Cells of a ring or torus: taken for switches, they would put each host on a switch of its own.
        raise HpctrainError(
            "HT-slurm-address-no-switch",
            "{where}: {level!r} in a pattern is no switch and no block",
            _HINT,
            where=place,
            level=min(others)[:60],
        )
    (host, *more) = expand_hosts(parts[-1], place)
    if more:
        raise HpctrainError(
            "HT-slurm-address-several-hosts",
            "{where}: {address!r} names several hosts",
            _HINT,
            where=place,
            address=address[:60],
        )
    # A level that a host has no switch on is empty; several switches on a level are in brackets.
    return [expand_names(part, place) for part in parts[:-1] if part], host
