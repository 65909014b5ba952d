"""Which hosts an elastic run is to have: those that it was given, as they are now, and that can be used."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from hpctrain.common.cluster.host_list import expand_hosts, expand_slots, fold_hosts
from hpctrain.common.run.plan import Plan
from hpctrain.control.hosts.hostfile import read_hostfile

_ALLOCATED = "SLURM_JOB_NODELIST"


def given_hosts(plan: Plan, environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The hosts that a run may have now, with the ranks that each has room for, in the order in which they are named.

    A hostfile may have changed since the run began. Hosts of which nobody says how many ranks they have room for have
    room for as many as the plan's largest has.

    Args:
        plan: of the run.
        environment: this process's.

    Raises:
        HpctrainError: the hostfile cannot be read.
    """
    options = plan.host_options
    if options.hosts is not None:
        hosts = expand_slots(options.hosts, "--hosts")
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile).hosts
    elif allocated := environment.get(_ALLOCATED):
        hosts = dict.fromkeys(expand_hosts(allocated, _ALLOCATED))
    else:
        return plan.ranks_of_hosts
    # As where hosts are arranged: those without slots beside others that have some have one.
    if any(hosts.values()):
        return {name: slots or 1 for name, slots in hosts.items()}
    known = plan.ranks_of_hosts
    return {name: known.get(name, max(known.values())) for name in hosts}


def chosen_hosts(
    plan: Plan, given: Mapping[str, int], usable: Collection[str], now: Mapping[str, int]
) -> dict[str, int]:
    """The hosts that the run is to have, with the ranks of each, in the order given: what it has stays.

    Args:
        plan: of the run.
        given: of :func:`given_hosts`.
        usable: those that can be started on, also of those that it has.
        now: those that it has, with their ranks.
    """
    named = [name for name in given if name in usable]
    order = sorted(named, key=lambda name: name not in now)[: plan.host_options.nodes]
    most = plan.fault_tolerance.max_ranks
    if most is None and plan.host_options.hostfile is None:
        # A list of hosts says how many there are to be, and -np how many ranks; a hostfile can grow.
        most = max(plan.begun_ranks or plan.ranks, len(order))
    chosen = dict.fromkeys(order, 0)
    # First what each has, so that nobody makes room for others.
    for room in (now, given):
        for name in order:
            free = sum(given.values()) if most is None else most - sum(chosen.values())
            wanted = min(given[name], room.get(name, 0)) - chosen[name]
            chosen[name] += max(0, min(wanted, free))
    return {name: chosen[name] for name in given if chosen.get(name)}


def change(now: Plan, wanted: Mapping[str, int]) -> str:
    """What other hosts are to be, in words."""
    names = now.ranks_of_hosts
    joining, leaving = [name for name in wanted if name not in names], [name for name in names if name not in wanted]
    moves = ((hosts, verb) for hosts, verb in ((joining, "join"), (leaving, "leave")) if hosts)
    parts = [f"{fold_hosts(hosts)} {verb}{'s' if len(hosts) == 1 else ''}" for hosts, verb in moves]
    return " and ".join(parts) or f"hosts have room for {'fewer' if sum(wanted.values()) < now.ranks else 'more'} ranks"
