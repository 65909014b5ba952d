"""What ``submit --dry-run`` prints: the script, the placement and the environment of the ranks."""

from __future__ import annotations

from hpctrain.batch.request import JobRequest
from hpctrain.launch.command import rank_environment
from hpctrain.launch.hosts import arrange
from hpctrain.plan import Plan
from hpctrain.planning.machine import this_machine
from hpctrain.planning.planner import place_plan


def preview(script: str, plan: Plan, request: JobRequest) -> str:
    """The text, whose first part is the script as it would be submitted.

    Args:
        script: the job's.
        plan: of the run, or of the first task of an array; without hosts.
        request: what is asked of Slurm.
    """
    placed, placement = _place(plan, request)
    environment = {**rank_environment(placed), **plan.start.environment}
    lines = [
        "",
        f"# Placement: {request.nodes} nodes of {request.tasks_per_node} ranks",
        *placement,
        "",
        "# Environment of every rank",
        *(f"{name}={value}" for name, value in environment.items()),
    ]
    return script + "\n".join(lines) + "\n"


def _place(plan: Plan, request: JobRequest) -> tuple[Plan, list[str]]:
    """The plan on the hosts that are known already, and what is to be said of them."""
    options = plan.host_options
    named = request.sbatch.get("nodelist")
    if named is None and options.fabric is None:
        threads = plan.model_copy(update={"threads_per_rank": request.cpus_per_task or 1})
        source = "scontrol show topology, or SLURM_TOPOLOGY_ADDR of its tasks"
        return threads, [f"made in the job, from its hosts and {source}"]
    chosen = options.model_copy(update={"hosts": named, "nodes": request.nodes})
    machine = this_machine()
    # Not the allocation of a job that this may be run in.
    hosts, warnings = arrange(chosen, machine.host, request.ranks, {}, whole_fabric=True)
    placed = place_plan(plan, hosts, machine)
    lines = [] if named else [f"for example on the first {request.nodes} hosts of {options.fabric}:"]
    first = 0
    for host in placed.hosts:
        last = first + host.slots - 1
        lines.append(f"{host.host}  " + (f"rank {first}" if first == last else f"ranks {first}-{last}"))
        first = last + 1
    if order := placed.host_order:
        worth = f"{order.crossings_given} as named, {order.crossings} in this order, no fewer than {order.bound} in any"
        lines.append(f"crossings of leaves by a ring over the hosts: {worth} ({order.fabric})")
    return placed, [*lines, *(f"warning: {warning}" for warning in warnings)]
