"""Runs all checks: of this machine alone, or of every host of a run, by ranks that are started there."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import hpctrain
from hpctrain.common.cluster.checks import Check
from hpctrain.common.cluster.launcher import SRUN_NONE, TORCHRUN, WITHOUT_MPI
from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import nearest_existing, temporary_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import HostOptions, Plan, Script, Start
from hpctrain.common.settings import BACKEND
from hpctrain.control.doctor.host_checks import check_host, import_of_torch
from hpctrain.control.doctor.host_facts import Host
from hpctrain.control.doctor.rank_checks import (
    MeasuredAllreduce,
    World,
    allreduce,
    launcher_and_mpi,
    merge,
    same_versions,
    without_ranks,
)
from hpctrain.control.hosts.arrange import are_given, arrange

if TYPE_CHECKING:
    from hpctrain.control.planning.place_hosts import PlacedHosts

_ORDER = ("failed", "ok", "not applicable")
# Of the ranks; ending what hangs then takes up to 15 s.
LIMIT_SECONDS = 40
# What starts two processes, by the launcher.
_BY_HAND = {TORCHRUN: "torchrun --nproc-per-node 2 --no-python hostname", SRUN_NONE: "srun --ntasks=2 hostname"}
_PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "doctor.py"


class _LimitError(Exception):
    pass


def diagnose(
    options: HostOptions, start: Start, ranks: int | None, run_directory: Path, *, notice: Callable[[str], None]
) -> list[Check]:
    """The checks, failed ones first.

    Args:
        ranks: their number. None for as many as a run would have; for none if neither hosts nor ``start`` are given.

    Raises:
        HpctrainError: hosts and ranks that do not fit, or no folder for what the ranks write.
    """
    if ranks is None and not are_given(options) and start == Start():
        return failed_first([*without_ranks(), import_of_torch(), *check_host(Host(), run_directory)])
    arranged, warnings = arrange(options, this_machine().host, ranks)
    for warning in warnings:
        notice(f"warning: {warning}")
    checks = check_ranks(arranged, options, start, run_directory)
    if len(checks) == 1:
        # The ranks failed before their hosts were checked; the checks of this machine may show why.
        checks += check_host(Host(hosts=len(arranged.slots)), run_directory)
    return failed_first(checks)


def failed_first(checks: Sequence[Check]) -> list[Check]:
    """Failed, then passed, then what does not apply; the order of the checks within each."""
    return sorted(checks, key=lambda check: _ORDER.index(check.status))


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
    # Other hosts, or a container, have to see the folder, so it is made beside the runs.
    shared = len(hosts.slots) > 1 or start.container is not None
    elsewhere = "name a folder that all hosts share with --run-dir"
    with temporary_folder(".hpctrain-doctor-", beside if shared else None, elsewhere) as name:
        folder = Path(name)
        plan = Plan(
            script=Script(path=_PROGRAM, arguments=(str(folder), str(ranks), str(run_directory.absolute()))),
            backend=_backend(start),
            ranks=ranks,
            hosts=hosts.slots,
            host_options=options,
            environment=hosts.environment,
            start=start.mounting(beside),
            threads_per_rank=1,
        )
        fault = _run(plan, folder / "run")
        written = [json.loads(path.read_text()) for path in sorted(folder.glob("world-*.json"))]
    checks = checks_of(written, ranks)
    # A mismatch of launcher and MPI explains the failed ranks, so the fault is left out.
    mismatched = bool(checks) and checks[0].status == "failed"
    return [*checks, fault] if fault and not mismatched else checks


def _backend(start: Start) -> str:
    """What ranks meet by that are started so. They ask for Horovod only where the user does."""
    if start.launcher in WITHOUT_MPI:
        return "gloo"
    return "horovod" if BACKEND.read() == "horovod" else "mpi"


def checks_of(written: list[dict[str, Any]], ranks: int) -> list[Check]:
    """The checks of what :mod:`hpctrain.worker.programs.doctor` wrote, once for each process that took itself for rank
    0.

    Args:
        written: what each of those processes wrote.
    """
    worlds = [World(**world) for process in written for world in process["worlds"]]
    if not worlds:
        return []
    checks = [launcher_and_mpi(worlds, ranks)]
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
        *same_versions({host: result["versions"] for host, result in all_ranks["hosts"].items()}),
        *merge(by_host),
    ]


def _run(plan: Plan, directory: Path) -> Check | None:
    """Run the ranks to their end; returns a check with the reason if they did not reach it.

    Whether Horovod fits is a check of its own.
    """
    from hpctrain.control.launchers.launcher_choice import first_launcher, require_image
    from hpctrain.control.supervision.audience import ReadyRun
    from hpctrain.control.supervision.start import run_plan

    remedy = f"start them by hand: {_BY_HAND.get(plan.start.launcher, 'mpirun -np 2 hostname')}"
    try:
        with _limit(LIMIT_SECONDS):
            machine = this_machine()
            require_image(plan.start.container)
            if plan.start.container is None and plan.start.python is None:
                require("train")
            ready = ReadyRun(plan=plan, machine=machine, launcher=first_launcher(plan))
            failure = run_plan(ready, RunDirectory(directory))
    except _LimitError:
        found = f"did not end in {LIMIT_SECONDS} s"
    except HpctrainError as error:
        found, remedy = error.message, error.hint
    else:
        if failure is None:
            return None
        found = " ".join([failure.message, *failure.lines[-3:]])
    return Check(name="ranks", status="failed", found=found, wanted=f"{plan.ranks} ranks that start", remedy=remedy)


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
