"""``hpctrain doctor``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import AsJson, NamedHosts, with_groups
from hpctrain.cli.training_options import StartOptions
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.files.printable import printable
from hpctrain.common.run.directory import RUNS
from hpctrain.report.output import answer_json, tell

if TYPE_CHECKING:
    from rich.text import Text

    from hpctrain.common.cluster.checks import Check

_MARKS = {"ok": "[green]ok[/]", "not applicable": "-"}


@with_groups
def doctor(
    ranks: Annotated[
        int | None,
        typer.Option("-np", metavar="N", help="Also check with this many ranks; by default as many as a run has."),
    ] = None,
    *,
    hosts: NamedHosts,
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Where runs will write, on a file system that all hosts share.")
    ] = RUNS,
    as_json: AsJson = False,
    start: StartOptions,
) -> None:
    """Check, before a run, for what would make it slow, wrong or hang; exits 3 if a check failed.

    Checks this machine; with -np, --hosts or an option for starting ranks, or inside a Slurm allocation, starts ranks
    to check every host of the run.
    """
    from hpctrain.common.run.plan import HostOptions, Start
    from hpctrain.control.doctor.diagnosis import diagnose

    checks = diagnose(
        HostOptions(**hosts.given()),
        Start(**start.changes()),
        ranks,
        run_dir,
        notice=lambda text: tell(f"hpctrain: {text}"),
    )
    answer_checks(checks, as_json=as_json)


def answer_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print checks, those that failed first; exits 3 if there are some."""
    if as_json:
        answer_json({"checks": [dataclasses.asdict(check) for check in checks]})
    else:
        _print(checks)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(3)


def _print(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for check in checks:
        if check.status == "failed":
            # Rich breaks no line here, so that a command can be copied.
            console.print(_failure(check), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        if check.status != "failed":
            style = "dim" if check.status == "not applicable" else ""
            remedy = f"; {check.remedy}" if check.remedy else ""
            found = escape(printable(f"{check.found}{_where(check)}{remedy}"))
            table.add_row(_MARKS[check.status], check.name, found, style=style)
    console.print(table)
    count = Counter(check.status for check in checks)
    console.print(f"{count['failed']} failed, {count['ok']} ok, {count['not applicable']} not applicable")


def _failure(check: Check) -> Text:
    from rich.text import Text

    text = Text("FAILED", style="bold red").append(f"  {check.name}{_where(check)}\n", style="bold")
    for label in ("found", "wanted", "remedy"):
        text.append(printable(f"        {label:<7} {getattr(check, label)}\n"), style="")
    return text


def _where(check: Check) -> str:
    return f" ({fold_hosts(check.where)})" if check.where else ""
