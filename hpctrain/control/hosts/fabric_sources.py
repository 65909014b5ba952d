"""Finds the fabric of a run: from a file of the user, from Slurm, or else a flat one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError, counted
from hpctrain.common.run.plan import HostOptions
from hpctrain.control.planning.place_hosts import KnownFabric
from hpctrain.control.topology.choice import Choice
from hpctrain.control.topology.readers import slurm, slurm_address
from hpctrain.control.topology.records import Record, SwitchGroup

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric

FLAT = "unknown, taken to be flat"

# srun starts one task a host; only there are the host's own address and its pattern.
_PRINT_ADDRESS = 'echo "$SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN"'


def find_fabric(options: HostOptions, hosts: Sequence[str], environment: Mapping[str, str] = os.environ) -> KnownFabric:
    """The fabric of :func:`given_fabric` or :func:`known_fabric`."""
    fabric = given_fabric(options, hosts)
    return KnownFabric(fabric, str(options.fabric)) if fabric else known_fabric(hosts, environment)


def given_fabric(options: HostOptions, hosts: Sequence[str]) -> Fabric | None:
    """The fabric of the file that ``options`` name, with its forwarding tables; None without a file.

    Args:
        hosts: the run's hosts that are known so far; of several topologies in the file, the one with them is taken.

    Raises:
        HpctrainError: the file cannot be read, or there are tables or a topology's name but no file.
    """
    if options.fabric is not None:
        # Imported here because it loads NumPy.
        from hpctrain.control.topology.build import read_fabric

        return read_fabric(options.fabric, options.routes, choice=Choice(name=options.topology, hosts=hosts))
    if options.routes is not None:
        raise HpctrainError(
            "HT-fabric-tables-alone",
            "--routes {routes}: forwarding tables alone do not say what is cabled to what",
            "name the output of ibnetdiscover with --fabric",
            routes=options.routes,
        )
    if options.topology is not None:
        raise HpctrainError(
            "HT-topology-name-without-file",
            "--topology {topology} is one of a file",
            "name the file with --fabric",
            topology=options.topology,
        )
    return None


def known_fabric(hosts: Sequence[str], environment: Mapping[str, str] = os.environ) -> KnownFabric:
    """The fabric that can be known without a file, and where from: the first of ``scontrol show topology``,
    ``SLURM_TOPOLOGY_ADDR`` of the job's tasks, and :data:`FLAT`, one switch for all hosts.

    A source that cannot be read or lacks one of the run's hosts is skipped with a warning, because the user did not
    ask for it.
    """
    # Imported here because it loads NumPy, which a run on one host does not need.
    from hpctrain.control.topology.build import build_fabric

    warnings: list[str] = []
    for read, source in _sources(hosts, environment):
        try:
            fabric = build_fabric(read())
        except HpctrainError as error:
            warnings.append(f"{source} is not used: {error.message}")
            continue
        unknown = [host for host in hosts if host not in fabric.hosts]
        if not unknown:
            return KnownFabric(replace(fabric, warnings=(*warnings, *fabric.warnings)), source)
        warnings.append(counted(f"{source} is not used: hosts that it lacks", unknown))
    flat = build_fabric([SwitchGroup(name="flat", hosts=tuple(hosts), where="the hosts of the run")])
    return KnownFabric(replace(flat, warnings=(*warnings, *flat.warnings)), FLAT)


def _sources(
    hosts: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[Callable[[], Iterable[Record]], str]]:
    """A reader of the fabric and the name of its source, the best source first."""
    # One host needs no fabric, and scontrol takes time to answer.
    tree = program_output("scontrol", "show", "topology") if len(hosts) > 1 else ""
    # Slurm without a topology plugin prints no switches.
    if "Name=" in tree:
        source = "scontrol show topology"
        yield partial(slurm.read, tree, source, Choice(hosts=hosts)), source
    # Where Slurm knows no switches, the address is only the host's name.
    if len(hosts) > 1 and environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node") != "node":
        command = ("srun", "--overlap", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}", "sh", "-c")
        if addresses := program_output(*command, _PRINT_ADDRESS):
            yield partial(slurm_address.read, addresses, "SLURM_TOPOLOGY_ADDR"), "SLURM_TOPOLOGY_ADDR"
