"""Starts the programs of ``hpctrain bench``, and others, on ranks."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.common.cluster.machine import Machine, same_host, this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import temporary_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import HostOptions, Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.stderr import tell
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.launchers.command import Launcher
from hpctrain.control.launchers.launcher_choice import first_launcher
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.supervision.audience import Audience, ReadyRun
from hpctrain.control.supervision.start import run_plan

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FLOAT_BYTES = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """``1K,64K,102400000`` in bytes, ascending; K, M and G are powers of 1024.

    Raises:
        HpctrainError: not such a list, or not of whole float32 values.
    """
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)", word.strip(), re.IGNORECASE)
        size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
        if size < 1 or size % _FLOAT_BYTES:
            raise HpctrainError(
                "HT-option-bad-value",
                "--sizes: {size!r} is not a number of bytes that whole float32 values fill",
                "for example --sizes 1K,1M,102400000",
                size=word,
            )
        sizes.append(size)
    return tuple(sorted(set(sizes)))


def measure(
    program: str,
    ranks: int | None,
    *arguments: str,
    backend: str = "mpi",
    hosts: HostOptions = HostOptions(),
) -> dict[str, Any]:
    """Run one of hpctrain.worker.bench's programs, started and bound as ``hpctrain run`` does it.

    Args:
        ranks: see :func:`run_on_hosts`; 1 for the backend ``single``, which needs no MPI.

    Returns:
        What it wrote, and ``load``: how many processes wanted a core of this host in the minute before; ``ranks`` and
        ``hosts``, how many there were; ``cores``, this host's; ``oversubscribed``: whether the ranks are more than the
        hosts' cores, every host being like this one.

    Raises:
        HpctrainError: a package that it needs is missing, or see :func:`run_on_hosts`.
    """
    require("train", "torch", *(["imagenet"] if program == "loader_rates" else []))
    load, cores = os.getloadavg()[0], this_machine().cores
    path = Path(hpctrain.__file__).parent / "worker" / "bench" / f"{program}.py"

    def request(out: Path) -> TrainingRequest:
        work = Script(path=path, arguments=(str(out), *arguments))
        return TrainingRequest(work=work, backend=backend, host_options=hosts)

    measured, plan = run_on_hosts(request, ranks, hosts)
    return {
        **measured,
        "load": round(load, 2),
        "ranks": plan.ranks,
        "hosts": len(plan.hosts),
        "cores": cores,
        "oversubscribed": plan.ranks > len(plan.hosts) * cores,
    }


def run_on_hosts(
    request: Callable[[Path], TrainingRequest], ranks: int | None, hosts: HostOptions
) -> tuple[dict[str, Any], Plan]:
    """Run a program of ranks, and read the JSON that rank 0 wrote.

    Args:
        request: makes the request of a program that writes to a file.
        ranks: how many; None for as many as the named hosts have slots, or 2 on this machine.
        hosts: by default this machine, also in a job. The current directory has to be that of all of them.

    Raises:
        HpctrainError: no launcher, hosts that are not there, no folder for what is written, or a rank failed.
    """
    machine = this_machine()
    # Without named hosts this machine is meant, also within a job.
    named = hosts.hosts is not None or hosts.hostfile is not None
    if ranks is None and not named:
        ranks = 2
    arranged, warnings = arrange(hosts, machine.host, ranks, os.environ if named else {})
    for warning in warnings:
        tell(f"hpctrain: warning: {warning}")
    elsewhere = any(not same_host(host.host, machine.host) for host in arranged.slots)
    with working_folder(shared=elsewhere) as name:
        folder = Path(name).absolute()
        out = folder / "written.json"
        plan = make_plan(request(out), machine, arranged)
        # Without a check of Horovod, which the benchmarks leave out where it is missing.
        launcher = first_launcher(plan) if plan.needs_launcher else None
        return run_program(plan, folder, machine, launcher, out), plan


def working_folder(*, shared: bool) -> tempfile.TemporaryDirectory[str]:
    """A folder for what a program writes; ``shared``: in the current directory, which other hosts see too.

    Raises:
        HpctrainError: it cannot be made.
    """
    elsewhere = "change to a folder that all hosts share and that you may write"
    return temporary_folder("hpctrain-bench-", Path() if shared else None, elsewhere)


def run_program(plan: Plan, folder: Path, machine: Machine, launcher: Launcher | None, out: Path) -> dict[str, Any]:
    """Run the plan of one of hpctrain.worker.bench's programs in a folder, and read what it wrote to ``out``.

    Raises:
        HpctrainError: a rank failed.
    """
    say = partial(print, end="", flush=True, file=sys.stderr)
    ready = ReadyRun(plan=plan, machine=machine, launcher=launcher)
    failure = run_plan(
        ready, RunDirectory(folder / "run"), Audience(output=say, notice=lambda text: tell(f"hpctrain: {text}"))
    )
    if failure:
        # The output of rank 0 was already shown, and its log is removed with the folder. The log of another one repeats
        # an error of hpctrain.
        said = failure.rank == 0 or any(failure.code in line for line in failure.lines)
        shown = replace(failure, lines=()) if said else failure
        raise HpctrainError(failure.code, "{failure}", exit_code=1, failure=shown, rank=failure.rank, host=failure.host)
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured
