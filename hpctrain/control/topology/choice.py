"""Chooses one of the topologies that a file of Slurm's has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.control.topology.records import Remark, SwitchGroup


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The criteria for selecting one of the topologies in a file.

    Attributes:
        name: the topology to take; None takes the one that has the hosts.
        hosts: the run's hosts that are known so far.
    """

    name: str | None = None
    hosts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One topology of a file: its groups, none for kinds without switches, and whether it is the cluster's default."""

    name: str
    groups: Sequence[SwitchGroup]
    default: bool = False
    kind: str = "tree"

    def count(self, hosts: Sequence[str]) -> int:
        """How many of these hosts it has."""
        return len({host for group in self.groups for host in group.hosts}.intersection(hosts))


def without_switches(kind: str, where: str) -> HpctrainError:
    """The error for a topology of a kind that names no switches and no blocks."""
    return HpctrainError(
        "HT-topology-no-groups",
        "{where}: a topology of kind {kind}, which describes no tree and no blocks",
        "there is nothing to place ranks by: give the output of ibnetdiscover or iblinkinfo instead",
        where=where,
        kind=kind,
    )


def choose(topologies: Sequence[Topology], choice: Choice, where: str) -> tuple[Topology, list[Remark]]:
    """The topology by which hosts are ordered, and remarks about the choice.

    Slurm takes the one that the job's partition names, else the first that is the cluster's default
    (https://slurm.schedmd.com/topology.yaml.html). A file does not name the partitions, but their hosts.

    Args:
        topologies: those of one file, at least one.

    Raises:
        HpctrainError: no topology has the name, or none is a tree or blocks, or several have equally many hosts of
            the run and none of these is the default.
    """
    if choice.name is not None:
        named = [topology for topology in topologies if topology.name == choice.name]
        if not named:
            valid = nearest(choice.name, [topology.name for topology in topologies])
            raise HpctrainError(
                "HT-choice-unknown", "{where}: no topology {name!r}", valid, where=where, name=choice.name
            )
        topologies = named
    shaped = [topology for topology in topologies if topology.groups]
    if not shaped:
        raise without_switches(" and ".join(dict.fromkeys(topology.kind for topology in topologies)), where)
    most = max(topology.count(choice.hosts) for topology in shaped)
    able = [topology for topology in shaped if topology.count(choice.hosts) == most]
    taken = next((topology for topology in able if topology.default), able[0])
    if len(able) == 1:
        return taken, []
    names = ", ".join(topology.name for topology in able)
    if most and not taken.default:
        raise HpctrainError(
            "HT-topology-ambiguous",
            "{where}: several topologies have these hosts: {names}",
            "--topology NAME chooses one",
            where=where,
            names=names,
        )
    which = "the default" if taken.default else "the first"
    text = f"of several topologies ({names}) {taken.name} is taken, {which}: --topology NAME chooses another"
    return taken, [Remark(text=text, where=where)]
