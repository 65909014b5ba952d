"""``hpctrain doctor``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.host_options import FabricFile, HostFile, HostList, Interface, Routes
from hpctrain.cli.start_options import (
    ContainerRuntime,
    Environment,
    Image,
    Interpreter,
    LauncherArguments,
    LauncherName,
    Mounts,
    SshPort,
    start_changes,
)
from hpctrain.cluster.host_list import fold_hosts

if TYPE_CHECKING:
    from rich.text import Text

    from hpctrain.cluster.checks import Check
    from hpctrain.run.plan import HostOptions, Start

_MARKS = {"ok": "[green]ok[/]", "not applicable": "-"}


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="Check on so many ranks too; by default as a run has."),
    ] = None,
    hosts: HostList = None,
    hostfile: HostFile = None,
    fabric: FabricFile = None,
    routes: Routes = None,
    interface: Interface = None,
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs are to write, on a file system that all hosts share.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    launcher: LauncherName = None,
    python: Interpreter = None,
    container: Image = None,
    container_runtime: ContainerRuntime = None,
    mounts: Mounts = None,
    environment: Environment = None,
    ssh_port: SshPort = None,
    launcher_arguments: LauncherArguments = None,
) -> None:
    """Check, before a run, what would make it slow, wrong or hang; exits 3 where something failed.

    Checks this machine; with -np, --hosts or a way to start ranks, or inside a Slurm allocation, every host of the run
    by ranks of its own.
    """
    from hpctrain.doctor.host import failed_first
    from hpctrain.run.plan import HostOptions, Start

    changes = start_changes(
        launcher=launcher,
        python=python,
        image=container,
        runtime=container_runtime,
        mounts=mounts or None,
        environment=environment or None,
        ssh_port=ssh_port,
        arguments=launcher_arguments,
    )
    options = HostOptions(hosts=hosts, hostfile=hostfile, fabric=fabric, routes=routes, interface=interface)
    checks = failed_first(_checks(options, Start(**changes), ranks, run_dir))
    if as_json:
        typer.echo(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(3)


def _checks(options: HostOptions, start: Start, ranks: int | None, run_dir: Path) -> list[Check]:
    from hpctrain.doctor.facts import read_host
    from hpctrain.doctor.host import check_host
    from hpctrain.doctor.ranks import without_ranks
    from hpctrain.run.plan import Start

    named = options.hosts is not None or options.hostfile is not None or os.environ.get("SLURM_JOB_NODELIST")
    if ranks is None and not named and start == Start():
        return [*without_ranks(), *check_host(read_host(), run_dir)]
    from hpctrain.doctor.start import check_ranks
    from hpctrain.launch.hosts import arrange
    from hpctrain.planning.machine import this_machine

    arranged, warnings = arrange(options, this_machine().host, ranks)
    for warning in warnings:
        typer.echo(f"hpctrain: warning: {warning}", err=True)
    checks = check_ranks(arranged, options, start, run_dir)
    if len(checks) > 1:
        return checks
    # The ranks did not come as far as their hosts; what this machine says may tell why.
    return [*checks, *check_host(read_host(hosts=len(arranged.slots)), run_dir)]


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for check in checks:
        if check.status == "failed":
            # Wrapped by the terminal alone, so that a command can be copied.
            console.print(_failure(check), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        if check.status != "failed":
            style = "dim" if check.status == "not applicable" else ""
            table.add_row(_MARKS[check.status], check.name, f"{check.found}{_where(check)}", style=style)
    console.print(table)
    count = Counter(check.status for check in checks)
    console.print(f"{count['failed']} failed, {count['ok']} ok, {count['not applicable']} not applicable")


def _failure(check: Check) -> Text:
    from rich.text import Text

    text = Text("FAILED", style="bold red").append(f"  {check.name}{_where(check)}\n", style="bold")
    for label in ("found", "wanted", "remedy", "source"):
        text.append(f"        {label:<7} {getattr(check, label)}\n", style="")
    return text


def _where(check: Check) -> str:
    return f" ({fold_hosts(check.where)})" if check.where else ""
