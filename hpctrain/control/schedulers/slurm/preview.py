"""What ``submit --dry-run`` says beside the script: placement and environment of the ranks as far as they are known."""

from __future__ import annotations

from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command import rank_environment
from hpctrain.control.planning.mesh import mesh_lines
from hpctrain.control.planning.planner import place_plan
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.scheduler import Order
from hpctrain.control.schedulers.slurm.batch import SETTINGS
from hpctrain.control.schedulers.slurm.submission import PreparedJob


def preview(order: Order, job: PreparedJob) -> str:
    """The text."""
    placed, placement = _place(job.plan, order.request)
    known, later = _environment(placed)
    if placed.recipe and placed.recipe.batch.micro_batch == "auto":
        later.append("batch.micro_batch")
    lines = [
        f"# Placement: {order.request.nodes} nodes of {order.request.tasks_per_node} ranks",
        *placement,
        "",
        "# Environment of every rank",
        *(f"{name}={value}" for name, value in {**order.cluster.profile.environment, **known}.items()),
        f"decided in the job: {', '.join(later)}",
        *(f"\n# {SETTINGS} in the run directory\n{text}" for text in [job.files.get(SETTINGS)] if text),
    ]
    return "\n".join(lines)


def _environment(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """The variables that are known already, and the names of those that depend on the job's nodes."""
    other: dict[str, object] = {"threads_per_rank": plan.threads_per_rank + 1}
    if plan.capabilities is None:
        plan = plan.model_copy(update={"backend_reason": "not chosen yet"})
        other |= {"backend": "chosen", "backend_reason": "for the job's hosts"}
    here, there = rank_environment(plan), rank_environment(plan.model_copy(update=other))
    known = {name: value for name, value in here.items() if there[name] == value}
    return known, [name for name in here if name not in known]


def _place(plan: Plan, request: JobRequest) -> tuple[Plan, list[str]]:
    """The plan on the hosts that are known already, and lines that describe the placement."""
    options = plan.host_options
    named = request.sbatch.get("nodelist")
    if named is None and options.fabric is None:
        return plan, ["made in the job, from its hosts and scontrol show topology"]
    # Imported here because it loads the readers of fabrics, which other previews do not need.
    from hpctrain.control.hosts.arrange import arrange

    chosen = options.model_copy(update={"hosts": named, "nodes": request.nodes})
    machine = this_machine()
    # With an empty environment, so that an allocation in which this command runs does not count.
    hosts, warnings = arrange(
        chosen, machine.host, request.ranks, {}, work=plan.recipe or plan.script, whole_fabric=True
    )
    # The backend may depend on the job's hosts as well.
    placed = place_plan(plan, hosts, machine).model_copy(update={"backend": plan.backend, "backend_reason": ""})
    lines = [] if named else [f"for example on the first {request.nodes} hosts of {options.fabric}:"]
    first = 0
    for host in placed.hosts:
        last = first + host.slots - 1
        lines.append(f"{host.host}  " + (f"rank {first}" if first == last else f"ranks {first}-{last}"))
        first = last + 1
    if order := placed.host_order:
        worth = f"{order.crossings_given} as named, {order.crossings} in this order, no fewer than {order.bound} in any"
        lines.append(f"crossings of leaves by a ring over the hosts: {worth} ({order.fabric})")
    return placed, [*lines, *mesh_lines(placed), *(f"warning: {warning}" for warning in warnings)]
