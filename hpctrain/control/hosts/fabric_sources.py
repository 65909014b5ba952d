"""Finds the fabric of a run: from a file of the user, from Slurm, or else a flat one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError, counted
from hpctrain.common.run.plan import HostOptions
from hpctrain.control.planning.place_hosts import KnownFabric
from hpctrain.control.topology.readers import slurm
from hpctrain.control.topology.readers.slurm import Choice
from hpctrain.control.topology.records import SwitchGroup

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric

FLAT = "unknown, taken to be flat"
_LISTED = "scontrol show topology"


def find_fabric(options: HostOptions, hosts: Sequence[str]) -> KnownFabric:
    """The fabric of :func:`given_fabric` or :func:`known_fabric`."""
    fabric = given_fabric(options, hosts)
    return KnownFabric(fabric, str(options.fabric)) if fabric else known_fabric(hosts)


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
            "HT-option-needs-another",
            "--routes {routes}: forwarding tables alone do not say what is cabled to what",
            "name the output of ibnetdiscover with --fabric",
            routes=options.routes,
        )
    if options.topology is not None:
        raise HpctrainError(
            "HT-option-needs-another",
            "--topology {topology} is one of a file",
            "name the file with --fabric",
            topology=options.topology,
        )
    return None


def known_fabric(hosts: Sequence[str]) -> KnownFabric:
    """The fabric that can be known without a file, and where from: ``scontrol show topology``, else :data:`FLAT`, one
    switch for all hosts.

    What scontrol prints is skipped with a warning where it cannot be read or lacks one of the run's hosts, because the
    user did not ask for it.
    """
    # Imported here because it loads NumPy, which a run on one host does not need.
    from hpctrain.control.topology.build import build_fabric

    flat = build_fabric([SwitchGroup(name="flat", hosts=tuple(hosts), where="the hosts of the run")])
    # One host needs no fabric, and scontrol takes time to answer.
    tree = program_output(*_LISTED.split()) if len(hosts) > 1 else ""
    # Slurm without a topology plugin prints no switches.
    if "Name=" not in tree:
        return KnownFabric(flat, FLAT)
    try:
        fabric = build_fabric(slurm.read(tree, _LISTED, Choice(hosts=hosts)))
    except HpctrainError as error:
        return KnownFabric(replace(flat, warnings=(f"{_LISTED} is not used: {error.message}", *flat.warnings)), FLAT)
    if unknown := [host for host in hosts if host not in fabric.hosts]:
        warning = counted(f"{_LISTED} is not used: hosts that it lacks", unknown)
        return KnownFabric(replace(flat, warnings=(warning, *flat.warnings)), FLAT)
    return KnownFabric(fabric, _LISTED)
