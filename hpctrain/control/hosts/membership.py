"""Chooses the hosts of an elastic run: those that the user or Slurm gives now, and that are usable."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.run.plan import Plan
from hpctrain.control.hosts.arrange import full_slots, named_hosts


def given_hosts(plan: Plan, environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The hosts that a run may use now, with the slots of each, in the order in which they are named.

    The hostfile is read again, since it may have changed. Where no slots are given, a new host gets as many as the
    plan's largest host has.

    Raises:
        HpctrainError: the hostfile cannot be read.
    """
    named, known = named_hosts(plan.host_options, environment), plan.ranks_of_hosts
    if named is None:
        return known
    return full_slots(named.hosts) or {name: known.get(name, max(known.values())) for name in named.hosts}


def chosen_hosts(
    plan: Plan, given: Mapping[str, int], usable: Collection[str], now: Mapping[str, int]
) -> dict[str, int]:
    """The hosts that the run should use, with the ranks of each, in the order given; present ranks keep their hosts.

    Args:
        given: the result of :func:`given_hosts`.
        usable: the hosts on which ranks can start, including present ones.
        now: the present hosts with their ranks.
    """
    named = [name for name in given if name in usable]
    order = sorted(named, key=lambda name: name not in now)[: plan.host_options.nodes]
    most = plan.fault_tolerance.max_ranks
    if most is None and plan.host_options.hostfile is None:
        # A list of hosts and -np fix the number of ranks; a hostfile can grow.
        most = max(plan.begun_ranks or plan.ranks, len(order))
    chosen = dict.fromkeys(order, 0)
    # Present ranks are counted first, so that none is moved to make room for a new host.
    for slots in (now, given):
        for name in order:
            free = sum(given.values()) if most is None else most - sum(chosen.values())
            wanted = min(given[name], slots.get(name, 0)) - chosen[name]
            chosen[name] += max(0, min(wanted, free))
    return {name: chosen[name] for name in given if chosen.get(name)}


def change(now: Plan, wanted: Mapping[str, int]) -> str:
    """The difference between the plan's hosts and the wanted ones, in words."""
    names = now.ranks_of_hosts
    joining, leaving = [name for name in wanted if name not in names], [name for name in names if name not in wanted]
    moves = ((hosts, verb) for hosts, verb in ((joining, "join"), (leaving, "leave")) if hosts)
    parts = [f"{fold_hosts(hosts)} {verb}{'s' if len(hosts) == 1 else ''}" for hosts, verb in moves]
    return " and ".join(parts) or f"hosts have room for {'fewer' if sum(wanted.values()) < now.ranks else 'more'} ranks"
