"""``hpctrain plan``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import HostsWithSlots, RecipeName, with_groups
from hpctrain.cli.training_options import TrainingOptions
from hpctrain.cli.work import print_notes
from hpctrain.common.cluster.launch_files import host_variables, slot_variables
from hpctrain.common.cluster.machine import as_if_installed, this_machine
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh_traffic import aligned, bytes_text
from hpctrain.common.run.plan import HostOptions, Plan
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.launchers.command_line import own_threads, rank_environment
from hpctrain.control.planning.mesh_plan import mesh_lines, parameters
from hpctrain.control.planning.planner import make_plan
from hpctrain.report.output import answer, answer_json, tell

if TYPE_CHECKING:
    from hpctrain.control.predict.zero import Stage, StateBytes

# What a ZeRO stage divides among the ranks.
_DIVIDES: Mapping[Stage, str] = {
    0: "nothing divided",
    1: "ZeRO 1: the optimizer's state",
    2: "ZeRO 2: gradients too",
    3: "ZeRO 3: parameters too",
}


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
        kept = {stage: vars(state) for stage, state in _state_bytes(made).items()}
        further = {"state_bytes": kept} if kept else {}
        answer_json({**made.model_dump(mode="json"), **further})
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
        kept = _state_lines(plan)
        lines += ["", *mesh_lines(plan), *(["", "state of a rank (* as planned):", *kept] if kept else [])]
    lines += ["", "environment of every rank:"]
    lines += [f"  {name}={value}" for name, value in rank_environment(plan, own_threads(os.environ)).items()]
    if plan.hosts[0].places:
        host = plan.hosts[0]
        lines += ["", f"environment of the ranks of {host.host}:"]
        lines += [f"  {name}={value}" for name, value in host_variables(host.places).items()]
        for local, slot in enumerate(host.places):
            lines += [f"  rank {local}: {name}={value}" for name, value in slot_variables(slot).items()]
    return "\n".join(lines)


def _state_bytes(plan: Plan) -> Mapping[Stage, StateBytes]:
    """The state of a rank by stage; empty where no state is divided, and for scripts, whose network is not known."""
    from hpctrain.control.predict.zero import all_stages, bytes_of_parameter

    sizes = plan.mesh.sizes
    if plan.recipe is None or sizes["dp_shard"] == 1:
        return {}
    divided = parameters(plan.recipe) / (sizes["pp"] * sizes["tp"])
    return all_stages(divided, bytes_of_parameter(plan.recipe.optimizer), sizes["dp_shard"] * sizes["cp"])


def _state_lines(plan: Plan) -> list[str]:
    """The bytes of :func:`_state_bytes` as the lines of a table; a star marks the plan's stage."""
    states = _state_bytes(plan)
    if not states:
        return []
    assert plan.recipe is not None
    rows = [
        (
            f"{'*' if stage == plan.recipe.sharding.zero else ' '} {_DIVIDES[stage]}",
            *map(bytes_text, (state.parameters, state.gradients, state.optimizer, state.total)),
        )
        for stage, state in states.items()
    ]
    return [*aligned([("", "parameters", "gradients", "optimizer", "together"), *rows])]
