"""Starts the ranks of ``hpctrain doctor``, and makes checks of their results, or of the reason why there are none."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import hpctrain
from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.machine import Machine, same_host, this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import nearest_existing, temporary_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import HostOptions, Plan, Script, Start
from hpctrain.common.settings import BACKEND
from hpctrain.control.doctor.host import merge
from hpctrain.control.doctor.ranks import MeasuredAllreduce, allreduce, clocks, host_order
from hpctrain.control.doctor.software import World, launcher_and_mpi, same_versions
from hpctrain.control.hosts.fabric_sources import FLAT, find_fabric
from hpctrain.control.launchers.command import Launcher
from hpctrain.control.launchers.launcher_choice import require_image
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.supervision.audience import ReadyRun
from hpctrain.control.supervision.start import prove_launcher, run_plan

# From the trial of the first launcher to the end of the ranks; ending what hangs then takes up to 15 s.
LIMIT_SECONDS = 40
# For the trial of one launcher: three that hang still leave time for the last.
_PROBE_SECONDS = 10.0
_PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "doctor.py"
_SOURCE = "https://docs.open-mpi.org/en/v5.0.x/launching-apps/quickstart.html"


class _LimitError(Exception):
    pass


def check_ranks(hosts: PlacedHosts, options: HostOptions, start: Start, run_directory: Path) -> list[Check]:
    """Start the ranks, and check what they see: each host, and all of them together.

    Args:
        hosts: with one slot for each rank.
        options: the options that chose the hosts.
        run_directory: where runs are to write, on all hosts.

    Raises:
        HpctrainError: no folder for what the ranks write.
    """
    ranks = sum(host.slots for host in hosts.slots)
    beside = nearest_existing(run_directory)
    failed: dict[str, str] = {}
    # Other hosts, or a container, have to see the folder, so it is made beside the runs.
    shared = len(hosts.slots) > 1 or start.container is not None
    elsewhere = "name a folder that all hosts share with --run-dir"
    with temporary_folder(".hpctrain-doctor-", beside if shared else None, elsewhere) as name:
        folder = Path(name)
        plan = Plan(
            script=Script(path=_PROGRAM, arguments=(str(folder), str(ranks), str(run_directory.absolute()))),
            # Ranks ask for Horovod only where the user does.
            backend="horovod" if BACKEND.read() == "horovod" else "mpi",
            ranks=ranks,
            hosts=hosts.slots,
            host_options=options,
            environment=hosts.environment,
            start=start.mounting(beside),
            threads_per_rank=1,
        )
        fault = _run(plan, folder / "run", failed)
        written = [json.loads(path.read_text()) for path in sorted(folder.glob("world-*.json"))]
    checks = checks_of(written, hosts, options, failed)
    # A mismatch of launcher and MPI explains the failed ranks, so the fault is left out.
    mismatched = bool(checks) and checks[0].status == "failed"
    return [*checks, fault] if fault and not mismatched else checks


def checks_of(
    written: list[dict[str, Any]], hosts: PlacedHosts, options: HostOptions, failed: Mapping[str, str]
) -> list[Check]:
    """The checks of what :mod:`hpctrain.worker.programs.doctor` wrote, once for each process that took itself for rank
    0.

    Args:
        written: what each of those processes wrote.
        failed: launchers that were tried before, and why they do not work.
    """
    worlds = [World(**world) for each in written for world in each["worlds"]]
    if not worlds:
        return []
    ranks = sum(host.slots for host in hosts.slots)
    checks = [launcher_and_mpi(worlds, ranks, failed)]
    if len(written) > 1 or "hosts" not in written[0]:
        return checks
    (all_ranks,) = written
    by_host = {
        host: [Check(**{**check, "where": tuple(check["where"])}) for check in result["checks"]]
        for host, result in all_ranks["hosts"].items()
    }
    return [
        *checks,
        *(allreduce(MeasuredAllreduce(**reduction), ranks) for reduction in all_ranks["reductions"]),
        clocks(all_ranks["offsets"]),
        *same_versions({host: result["versions"] for host, result in all_ranks["hosts"].items()}),
        _order([world.host for world in worlds], [host.host for host in hosts.slots], options),
        *merge(by_host),
    ]


def _order(hosts: list[str], planned: list[str], options: HostOptions) -> Check:
    """The order of the ranks' hosts by the plan's names: a host's own name may be longer or shorter."""
    known = [next((name for name in planned if same_host(name, host)), host) for host in hosts]
    names = list(dict.fromkeys(known))
    fabric, known_from = find_fabric(options, names)
    return host_order(names, fabric, known_from, flat=known_from == FLAT)


def _launcher(plan: Plan, machine: Machine, folder: Path, failed: dict[str, str]) -> Launcher:
    """The launcher that works here; ``failed`` gets those that do not. Whether Horovod fits is a check of its own."""
    require_image(plan)
    if plan.start.container is None and plan.start.python is None:
        require("train")
    return prove_launcher(plan, machine, folder, seconds=_PROBE_SECONDS, say=lambda _, reasons: failed.update(reasons))


def _run(plan: Plan, directory: Path, failed: dict[str, str]) -> Check | None:
    """Run the ranks to their end; returns a check with the reason if they did not reach it."""
    try:
        with _limit(LIMIT_SECONDS):
            machine = this_machine()
            launcher = _launcher(plan, machine, directory.parent, failed)
            failure = run_plan(ReadyRun(plan=plan, machine=machine, launcher=launcher), RunDirectory(directory))
    except _LimitError:
        said, remedy = f"did not end in {LIMIT_SECONDS} s", "start them by hand: mpirun -np 2 hostname"
    except HpctrainError as error:
        said, remedy = error.message, error.hint
    else:
        if failure is None:
            return None
        said, remedy = " ".join([failure.message, *failure.lines[-3:]]), "start them by hand: mpirun -np 2 hostname"
    return Check(
        name="ranks",
        status="failed",
        found=said,
        wanted=f"{plan.ranks} ranks that start",
        remedy=remedy,
        source=_SOURCE,
    )


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise in the main thread when the time is over: the run then ends every process that it started."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _LimitError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
