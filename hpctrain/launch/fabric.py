"""Which fabric a run is on: a file that the user gives, what Slurm knows, else a flat one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.topology.build import build_fabric, read_fabric
from hpctrain.topology.fabric import Fabric
from hpctrain.topology.readers import slurm, slurm_address
from hpctrain.topology.records import Group

FLAT = "unknown, taken to be flat"

_TIMEOUT_SECONDS = 60
# srun starts one task a host; only there are the host's own address and its pattern.
_PRINT_ADDRESS = 'echo "$SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN"'


def find_fabric(
    given: Path | None,
    routes: Path | None,
    hosts: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Fabric, str]:
    """The fabric, and where it is known from: the first of a given file, ``scontrol show topology``,
    ``SLURM_TOPOLOGY_ADDR`` of the job's tasks, and :data:`FLAT`, one switch for all hosts.

    Args:
        given: a file of any format that ``read_fabric`` knows.
        routes: forwarding tables for it.
        hosts: of the run.
        environment: this process's.

    Raises:
        HpctrainError: the file or what Slurm printed cannot be read.
    """
    if given:
        return read_fabric(given, routes), str(given)
    # One host needs no fabric, and asking takes its time.
    tree = _output("scontrol", "show", "topology") if len(hosts) > 1 else ""
    # A Slurm without a topology plugin prints nothing of the kind.
    if "Name=" in tree:
        return build_fabric(slurm.read(tree, "scontrol show topology")), "scontrol show topology"
    # Without switches the address is the host's name alone.
    if len(hosts) > 1 and environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node") != "node":
        command = ("srun", "--overlap", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}", "sh", "-c")
        if addresses := _output(*command, _PRINT_ADDRESS):
            return build_fabric(slurm_address.read(addresses, "SLURM_TOPOLOGY_ADDR")), "SLURM_TOPOLOGY_ADDR"
    return build_fabric([Group(name="flat", hosts=tuple(hosts), where="the hosts of the run")]), FLAT


def _output(program: str, *arguments: str) -> str:
    """What a program prints, empty where it is not installed or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""
