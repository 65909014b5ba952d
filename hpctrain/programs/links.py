"""Measures the links between the hosts of a job: starts ranks that send to each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.cluster.host_list import expand_hosts
from hpctrain.cluster.mpi import find_mpi
from hpctrain.errors import HpctrainError
from hpctrain.files.disk import disk_error
from hpctrain.planning.machine import this_machine
from hpctrain.programs.bench import run_program
from hpctrain.run.directory import write_json
from hpctrain.run.plan import Plan, Script, Slots
from hpctrain.topology.verify import End, Flow, rounds

_PROGRAM = Path(hpctrain.__file__).parent / "rank_programs" / "links.py"


def allocated_hosts(hosts: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The hosts of a job: those that the user names, else those of the Slurm allocation.

    Raises:
        HpctrainError: neither is there, or it is only one host.
    """
    where = "--hosts" if hosts else "SLURM_JOB_NODELIST"
    text = hosts or environment.get("SLURM_JOB_NODELIST")
    if not text:
        raise HpctrainError(
            "no hosts to measure between: this is no Slurm allocation",
            "start it inside an allocation (salloc, sbatch), name --hosts, or try it here with -np 2",
        )
    names = expand_hosts(text, where)
    if len(names) < 2:
        raise HpctrainError(f"{where}: there is no link to measure on one host", "name at least two, or use -np 2")
    return names


def measure_links(hosts: Sequence[str], ranks: int, size: int) -> list[Flow]:
    """Measure between hosts, or between ranks of this machine where ``hosts`` is empty.

    Args:
        hosts: in the order of the ring. The current directory has to be theirs too.
        ranks: how many a host.
        size: bytes of a message.

    Raises:
        HpctrainError: no MPI, no folder for what is measured, or a rank failed.
    """
    machine = this_machine()
    slots = [Slots(host=host, slots=ranks) for host in hosts or (machine.host,)]
    schedule = rounds(len(hosts), ranks) if hosts else rounds(ranks)
    with _folder(shared=bool(hosts)) as name:
        folder = Path(name)
        out, pairs = folder / "flows.json", folder / "rounds.json"
        write_json(pairs, schedule)
        plan = Plan(
            script=Script(path=_PROGRAM, arguments=(str(out), str(pairs), str(size))),
            backend="mpi",
            ranks=sum(each.slots for each in slots),
            hosts=tuple(slots),
            threads_per_rank=1,
        )
        return flows_of(run_program(plan, folder, machine, find_mpi(), out), plan)


def _folder(*, shared: bool) -> tempfile.TemporaryDirectory[str]:
    try:
        # Ranks of other hosts see no temporary folder of this one.
        return tempfile.TemporaryDirectory(prefix="hpctrain-links-", dir=Path.cwd() if shared else None)
    except OSError as error:
        here = Path(error.filename or ".")
        raise disk_error(error, here, "change to a folder that all hosts share and that you may write") from error


def flows_of(measured: dict[str, Any], plan: Plan) -> list[Flow]:
    """What :mod:`hpctrain.rank_programs.links` wrote.

    Hosts have the plan's names, as the fabric has them: what a host calls itself may be longer, or shorter.
    """
    hosts = [host.host for host in plan.hosts for _ in range(host.slots)]
    ends = [End(host=host, device=device) for host, device in zip(hosts, measured["devices"], strict=True)]
    return [
        Flow(
            round=flow["round"],
            source=ends[flow["source"]],
            target=ends[flow["target"]],
            bandwidth=flow["bandwidth"],
            latency=flow["latency"],
            spread=flow["spread"],
        )
        for flow in measured["flows"]
    ]
