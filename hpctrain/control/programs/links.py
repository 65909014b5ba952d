"""Measures the links between the hosts of a job: starts ranks that send to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import write_json
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots, Start
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.programs.bench import run_program, working_folder
from hpctrain.control.supervision.start import available_launcher
from hpctrain.control.topology.verify import End, Flow, rounds

_PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "links.py"


def hosts_to_measure(options: HostOptions) -> tuple[PlacedHosts, tuple[str, ...]]:
    """The hosts that the user names, else those of the job, as a run on them has them; and warnings.

    Raises:
        HpctrainError: it is only one host, or the hosts cannot be arranged.
    """
    hosts, warnings = arrange(options, this_machine().host, None)
    if len(hosts.slots) < 2:
        raise HpctrainError(
            "HT-hosts-too-few",
            "there is no link to measure on one host",
            "name at least two with -H, or start it inside an allocation (salloc, sbatch)",
        )
    return hosts, warnings


def measure_links(
    hosts: PlacedHosts, ranks: int, size: int, start: Start = Start(), options: HostOptions = HostOptions()
) -> list[Flow]:
    """Measure between hosts.

    Args:
        hosts: in the order of the ring; their slots do not count. The current directory has to be theirs too.
        ranks: the number of ranks on each host.
        size: the size of a message in bytes.
        options: the options that chose the hosts.

    Raises:
        HpctrainError: nothing to start ranks with, no folder for what is measured, or a rank failed.
    """
    machine = this_machine()
    names = [host.host for host in hosts.slots]
    with working_folder(shared=True) as name:
        folder = Path(name)
        out, pairs = folder / "flows.json", folder / "rounds.json"
        write_json(pairs, rounds(len(names), ranks))
        plan = Plan(
            script=Script(path=_PROGRAM, arguments=(str(out), str(pairs), str(size))),
            backend="mpi",
            ranks=len(names) * ranks,
            hosts=tuple(Slots(host=name, slots=ranks) for name in names),
            host_options=options,
            environment=hosts.environment,
            start=start.mounting(folder),
            threads_per_rank=1,
        )
        launcher = available_launcher(plan, machine)
        try:
            measured = run_program(plan, folder, machine, launcher, out)
        except HpctrainError as error:
            remedy = f"`hpctrain doctor -H {fold_hosts(names)}` looks further; all hosts have to share {Path.cwd()}"
            raise error.but(hint=error.hint or remedy) from error
        return flows_of(measured, plan)


def flows_of(measured: dict[str, Any], plan: Plan) -> list[Flow]:
    """The flows that :mod:`hpctrain.worker.programs.links` measured.

    Hosts have the names of the plan and the fabric: a host's own name may be longer or shorter.
    """
    hosts = [host.host for host in plan.hosts for _ in range(host.slots)]
    ends = [End(host=host, device=device) for host, device in zip(hosts, measured["devices"], strict=True)]
    return [
        Flow(
            round=flow["round"],
            source=ends[flow["source"]],
            target=ends[flow["target"]],
            bandwidth=flow["bandwidth"],
            spread=flow["spread"],
        )
        for flow in measured["flows"]
    ]
