"""``hpctrain plan``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from hpctrain.cli.options import HostsWithSlots, RecipeName, with_groups
from hpctrain.cli.training_options import TrainingOptions
from hpctrain.cli.work import print_notes
from hpctrain.common.cluster.launch_files import host_variables, slot_variables
from hpctrain.common.cluster.machine import as_if_installed, this_machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.plan import HostOptions, Plan
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.launchers.command_line import own_threads, rank_environment
from hpctrain.control.planning.mesh_plan import mesh_lines
from hpctrain.control.planning.planner import make_plan
from hpctrain.report.output import answer, answer_json, tell


@with_groups
def plan(
    recipe: RecipeName,
    ranks: Annotated[
        int | None, typer.Option("-np", metavar="N", help="Ranks on all hosts; by default one per GPU or host.")
    ] = None,
    *,
    hosts: HostsWithSlots,
    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The first N hosts of the list, the allocation or the fabric."),
    ] = None,
    training: TrainingOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a run would be: its ranks, hosts in order and environment. Starts nothing.

    How long it takes, how well it scales and what it needs: hpctrain predict.
    """
    machine = this_machine()
    frameworks, missing = as_if_installed(machine.frameworks)
    machine = replace(machine, frameworks=frameworks)
    work = load_recipe(recipe, training.of_recipe)
    arranged, warnings = arrange(
        HostOptions(**hosts.given(), nodes=nodes), machine.host, ranks, work=work, whole_fabric=True
    )
    for warning in (*warnings, *missing):
        tell(f"hpctrain: warning: {warning}")
    request = TrainingRequest(
        work=print_notes(work), backend=training.backend, framework=training.framework, with_data=False
    )
    made = make_plan(request, machine, arranged)
    if as_json:
        answer_json(made.model_dump(mode="json"))
    else:
        answer(_text(made))


def _text(plan: Plan) -> str:
    from ClusterShell.RangeSet import RangeSet

    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    lines = [
        f"{plan.title}: {ranks}, {plan.framework}, backend {plan.backend}",
        *([f"batch.micro_batch: {plan.micro_batch_reason}"] if plan.micro_batch_reason else []),
        "",
        "hosts, in the order of their ranks:",
    ]
    first = 0
    for host in plan.hosts:
        last = first + host.slots - 1
        numbers = f"rank {first}" if first == last else f"ranks {first}-{last}"
        lines.append(f"  {host.host}  {numbers}")
        for local, slot in enumerate(host.places):
            if slot.cores:
                cores = f"cores {RangeSet(','.join(map(str, slot.cores)))}"
            else:
                cores = (
                    "no cores of its own" if slot.numa is None else f"its share of NUMA node {slot.numa}, in the job"
                )
            gpu = f"GPU {slot.gpu}, " if slot.gpu is not None else ""
            adapter = f"{slot.adapter}, " if slot.adapter is not None else ""
            lines.append(f"    rank {first + local}: {gpu}{adapter}{cores}")
        first = last + 1
    if order := plan.host_order:
        saved = f"{order.crossings_given} in the order given, {order.crossings} in this one"
        lines += ["", f"crossings of leaves by a ring over the hosts: {saved}; no order has fewer than {order.bound}"]
        lines += [f"fabric: {order.fabric}"]
    if plan.mesh_traffic:
        lines += ["", *mesh_lines(plan)]
    lines += ["", "environment of every rank:"]
    lines += [f"  {name}={value}" for name, value in rank_environment(plan, own_threads(os.environ)).items()]
    if plan.hosts[0].places:
        host = plan.hosts[0]
        lines += ["", f"environment of the ranks of {host.host}:"]
        lines += [f"  {name}={value}" for name, value in host_variables(host.places).items()]
        for local, slot in enumerate(host.places):
            lines += [f"  rank {local}: {name}={value}" for name, value in slot_variables(slot).items()]
    return "\n".join(lines)
