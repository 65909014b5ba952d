"""Measures the links between the hosts of a job: starts ranks that send to each other."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import hpctrain
from hpctrain.cluster.host_list import expand_hosts
from hpctrain.cluster.mpi import find_mpi
from hpctrain.errors import HpctrainError
from hpctrain.launch.start import launch_plan
from hpctrain.plan import Plan, Script, Slots
from hpctrain.planning.machine import this_machine
from hpctrain.rundir import RunDirectory
from hpctrain.topology.verify import End, Flow, rounds

_PROGRAM = Path(hpctrain.__file__).parent / "bench" / "links.py"


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
        HpctrainError: no MPI, or a rank failed.
    """
    machine = this_machine()
    slots = [Slots(host=host, slots=ranks) for host in hosts or (machine.host,)]
    schedule = rounds(len(hosts), ranks) if hosts else rounds(ranks)
    # Ranks of other hosts see no temporary folder of this one.
    with tempfile.TemporaryDirectory(prefix="hpctrain-links-", dir=Path.cwd() if hosts else None) as name:
        folder = Path(name)
        out, pairs = folder / "flows.json", folder / "rounds.json"
        pairs.write_text(json.dumps(schedule))
        plan = Plan(
            script=Script(path=_PROGRAM, arguments=(str(out), str(pairs), str(size))),
            backend="horovod",
            ranks=sum(each.slots for each in slots),
            hosts=tuple(slots),
            threads_per_rank=1,
        )
        line = _to_stderr
        failure = launch_plan(plan, RunDirectory(folder / "run"), machine, find_mpi(), line=line)
        if failure:
            raise HpctrainError(str(failure), exit_code=1)
        return _flows(json.loads(out.read_text()))


def _flows(measured: dict[str, list[dict[str, float | str]]]) -> list[Flow]:
    ends = [End(host=str(end["host"]), device=str(end["device"])) for end in measured["ends"]]
    return [
        Flow(
            round=int(flow["round"]),
            source=ends[int(flow["source"])],
            target=ends[int(flow["target"])],
            bandwidth=float(flow["bandwidth"]),
            latency=float(flow["latency"]),
        )
        for flow in measured["flows"]
    ]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
