"""``hpctrain plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpctrain.cli import completion
from hpctrain.cli.host_options import HostsWithSlots
from hpctrain.cli.option_groups import with_groups
from hpctrain.cli.run_options import TrainingOptions
from hpctrain.cli.work import told
from hpctrain.launch.command import rank_environment
from hpctrain.launch.hosts import arrange
from hpctrain.planning.machine import as_if_installed, this_machine
from hpctrain.planning.planner import make_plan
from hpctrain.recipes.load import load_recipe
from hpctrain.run.plan import HostOptions, Plan
from hpctrain.topology.launch_files import host_variables, slot_variables


@with_groups
def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's name or file.", autocompletion=completion.recipes)
    ],
    ranks: Annotated[
        int | None, typer.Option("-np", metavar="N", help="Ranks on all hosts; by default one per GPU or host.")
    ] = None,
    *,
    hosts: HostsWithSlots,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="The first N hosts of the list, the allocation or the fabric.")
    ] = None,
    training: TrainingOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
) -> None:
    """Show what a run would be: its ranks, hosts in order and environment. Starts nothing."""
    machine, missing = as_if_installed(this_machine())
    arranged, warnings = arrange(HostOptions(**hosts.given(), nodes=nodes), machine.host, ranks, whole_fabric=True)
    for warning in (*warnings, *missing):
        typer.echo(f"hpctrain: warning: {warning}", err=True)
    made = make_plan(
        told(load_recipe(recipe, training.overrides or [])),
        machine,
        backend=training.backend or "auto",
        framework=training.framework,
        hosts=arranged,
    )
    typer.echo(made.model_dump_json(indent=2) if as_json else _text(made))


def _text(plan: Plan) -> str:
    from ClusterShell.RangeSet import RangeSet

    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    lines = [
        f"{plan.title}: {ranks}, {plan.framework}, backend {plan.backend}",
        "",
        "hosts, in the order of their ranks:",
    ]
    first = 0
    for host in plan.hosts:
        last = first + host.slots - 1
        numbers = f"rank {first}" if first == last else f"ranks {first}-{last}"
        lines.append(f"  {host.host}  {numbers}")
        for local, slot in enumerate(host.places):
            cores = (
                f"cores {RangeSet(','.join(map(str, slot.cores)))}" if slot.cores else "cores as the launcher has them"
            )
            gpu = f"GPU {slot.gpu}, " if slot.gpu is not None else ""
            adapter = f"{slot.adapter}, " if slot.adapter is not None else ""
            lines.append(f"    rank {first + local}: {gpu}{adapter}{cores}")
        first = last + 1
    if order := plan.host_order:
        saved = f"{order.crossings_given} in the order given, {order.crossings} in this one"
        lines += ["", f"crossings of leaves by a ring over the hosts: {saved}; no order has fewer than {order.bound}"]
        lines += [f"fabric: {order.fabric}"]
    lines += ["", "environment of every rank:"]
    lines += [f"  {name}={value}" for name, value in rank_environment(plan).items()]
    if plan.hosts[0].places:
        host = plan.hosts[0]
        lines += ["", f"environment of the ranks of {host.host}:"]
        lines += [f"  {name}={value}" for name, value in host_variables(host.places).items()]
        for local, slot in enumerate(host.places):
            lines += [f"  rank {local}: {name}={value}" for name, value in slot_variables(slot).items()]
    return "\n".join(lines)
