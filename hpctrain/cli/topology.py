"""``hpctrain topology``: cabling, placement of ranks, and measurement of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.options import AsJson, NamedHosts, Routes, with_groups
from hpctrain.cli.training_options import StartOptions
from hpctrain.report.output import answer, answer_json, print_table, save, table, tell

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric
    from hpctrain.control.topology.mesh_layout import Laid
    from hpctrain.control.topology.placement import Placement, PlacementReport
    from hpctrain.control.topology.verify import Fault, Flow

app = typer.Typer(add_completion=False, no_args_is_help=True)

FabricFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FABRIC...",
        help="Output of ibnetdiscover or Slurm: a file, or one per subnet.",
    ),
]
FabricOption = Annotated[
    list[Path],
    typer.Option("--fabric", metavar="FABRIC", help="Fabric file as for `topology show`; repeatable, one per subnet."),
]


def _read(files: Sequence[Path], routes: Path | None) -> Fabric:
    from hpctrain.control.topology.build import read_fabric

    return read_fabric(files, routes)


_MOST_RANKS = 1024
ORDERS = {"given": "as given", "name": "by name", "tree": "by tree", "placed": "placed"}


@app.command()
def show(fabric_files: FabricFiles, *, routes: Routes = None, as_json: AsJson = False) -> None:
    """Show what a fabric consists of, with its irregularities."""
    from hpctrain.control.topology.summary import counts, leaf_oversubscription, subnets

    fabric = _read(fabric_files, routes)
    numbers, parts, ratios = counts(fabric), subnets(fabric), leaf_oversubscription(fabric)
    if as_json:
        answer_json({**numbers, "by_subnet": parts, "oversubscription": ratios, "warnings": fabric.warnings})
        return
    title = ", ".join(map(str, fabric_files))
    print_table(table(numbers, [[f"{number:,}" for number in numbers.values()]], title=title))
    for number, part in enumerate(parts if len(parts) > 1 else (), start=1):
        answer(f"subnet {number}: " + ", ".join(f"{count:,} {kind}" for kind, count in part.items()))
    if known := sorted(ratio for ratio in ratios.values() if ratio):
        low, high = f"{known[0]:.3g}:1", f"{known[-1]:.3g}:1"
        answer(f"oversubscription of the leaves: {low}" + (f" to {high}" if high != low else ""))
    for warning in fabric.warnings:
        answer(f"warning: {warning}")


@app.command()
def place(
    fabric_files: FabricOption,
    hosts: Annotated[str, typer.Option(metavar="LIST", help="The job's hosts, in order: gpu[001-032],gpu040.")],
    *,
    routes: Routes = None,
    ranks_per_host: Annotated[
        int,
        typer.Option(
            "--ranks-per-host",
            "--gpus-per-node",
            min=1,
            max=_MOST_RANKS,
            help="Ranks per host of --mesh, and slots of a host in --hostfile.",
        ),
    ] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", metavar="AXIS=RANKS,…", help="Lay this mesh over the hosts, such as tp=8,pp=4,dp_shard=16."
        ),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="Write the order as Open MPI's hostfile.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the order of hosts in which a ring, or a mesh, crosses the fewest leaves and shares its links least."""
    from hpctrain.common.cluster.host_list import expand_hosts
    from hpctrain.common.cluster.launch_files import open_mpi_hostfile
    from hpctrain.control.topology.placement import report
    from hpctrain.control.topology.summary import host_numbers

    names = expand_hosts(hosts, "--hosts")
    fabric = _read(fabric_files, routes)
    _warn(fabric.warnings)
    found = report(fabric, host_numbers(fabric, names))
    laid = _laid(fabric, found, mesh, ranks_per_host)
    _warn([laid.traffic.warning] if laid and laid.traffic.warning else [])
    order = [fabric.hosts[host] for host in (laid.order if laid else found.placed.order)]
    if found.short:
        rest = "rail that all have takes" if found.rails == 1 else f"{found.rails} rails that all have take"
        _warn([f"{', '.join(found.short)}: fewer adapters than the other hosts; only the {rest} part"])
    slots = range(ranks_per_host)
    if hostfile:
        save(hostfile, open_mpi_hostfile((host, slots) for host in order))
    if as_json:
        rows = {name: _row(getattr(found, name), found) for name in ORDERS}
        optimal = {"already_optimal": found.already_optimal}
        traffic = {"mesh": laid.traffic.model_dump(mode="json")} if laid else {}
        answer_json({"order": order, **rows, **optimal, **traffic})
    else:
        _print_placement(found, order, laid)


@app.command()
@with_groups
def verify(
    *,
    hosts: NamedHosts,
    ranks_per_host: Annotated[
        int, typer.Option(min=1, max=_MOST_RANKS, help="Ranks per host; one per adapter measures every rail.")
    ] = 1,
    size_mb: Annotated[float, typer.Option(min=0.001, help="Size of a message.")] = 16.0,
    slow: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="A flow below this share of the usual bandwidth is slow.")
    ] = 0.7,
    as_json: AsJson = False,
    start: StartOptions,
) -> None:
    """Measure the bandwidth between ring neighbours and across leaves; exit 3 if one is low.

    Names the slow host, adapter or link, and the direction in which it is slow. Starts ranks on --hosts, by default
    those of the Slurm allocation, as `hpctrain run` does; slots do not count. Flows are compared with each other, with
    the fabric's links where --fabric or Slurm knows them, and need three hosts to tell which one is slow. The current
    directory has to be one that all hosts share.
    """
    from hpctrain.common.run.plan import HostOptions, Start
    from hpctrain.control.hosts.arrange import FLAT, find_fabric
    from hpctrain.control.programs.links import hosts_to_measure, measure_links
    from hpctrain.control.topology.verify import compare, incomparable

    options = HostOptions(**hosts.given())
    measured, warnings = hosts_to_measure(options)
    fabric, known_from = find_fabric(options, [host.host for host in measured.slots])
    if known_from != FLAT:
        tell(f"hpctrain: the fabric: {known_from}")
    _warn(warnings)
    flows = measure_links(measured, ranks_per_host, round(size_mb * 1e6), Start(**start.changes()), options)
    faults = compare(flows, fabric, slow=slow)
    _print_links(flows, faults, as_json=as_json)
    if not faults and incomparable(flows, fabric):
        _warn(["two hosts cannot be compared: a link slow in both directions goes unnoticed; add a third host"])
    raise typer.Exit(3 if faults else 0)


def _laid(fabric: Fabric, found: PlacementReport, mesh: str | None, ranks_per_host: int) -> Laid | None:
    """The mesh over placed hosts; None without one."""
    if mesh is None:
        return None
    from hpctrain.common.recipes.mesh import parse_mesh
    from hpctrain.control.topology.mesh_flows import published_work
    from hpctrain.control.topology.mesh_layout import lay

    given = found.given.order
    work = published_work(parse_mesh(mesh).at(ranks_per_host * len(given)))
    return lay(fabric, given, found.placed.order, dict.fromkeys(given, ranks_per_host), work)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        tell(f"hpctrain: warning: {warning}")


def _row(order: Placement, found: PlacementReport) -> dict[str, Any]:
    return {
        "crossings": order.crossings,
        "bound": found.bound,
        "crossings_by_level": order.crossings_by_level,
        "bound_by_level": found.bound_by_level,
        "worst_load": order.worst_load,
        "bandwidth_bytes_per_s": order.bandwidth_bytes_per_s,
    }


def _print_placement(found: PlacementReport, order: Sequence[str], laid: Laid | None) -> None:
    each = "1 adapter" if found.rails == 1 else f"{found.rails} adapters"
    title = f"{len(order)} hosts with {each} each; no order has fewer than {found.bound} crossings"
    higher = ["higher up"] if found.bound_by_level[1:] else []
    rows = []
    for name, words in ORDERS.items():
        row: Placement = getattr(found, name)
        speed = row.bandwidth_bytes_per_s
        crossings = [str(row.crossings), ", ".join(map(str, row.crossings_by_level[1:]))][: 1 + len(higher)]
        bandwidth = f"{speed / 1e9:.1f} GB/s" if speed else "speeds unknown"
        rows.append([words, *crossings, f"{row.worst_load:g}", bandwidth])
    columns = ["order", "crossings", *higher, "worst link load", "all-reduce bandwidth"]
    print_table(table(columns, rows, title=title, left=("order",)))
    if found.already_optimal:
        answer("the given order is already optimal")
    if laid:
        answer("\n".join(["", "mesh, sent in a step:", *laid.traffic.lines(), ""]))
    answer(",".join(order))


def _print_links(flows: Sequence[Flow], faults: Sequence[Fault], *, as_json: bool) -> None:
    if as_json:
        written = [{**asdict(flow), "source": str(flow.source), "target": str(flow.target)} for flow in flows]
        answer_json({"flows": written, "faults": [asdict(fault) for fault in faults]})
        return
    from hpctrain.control.topology.verify import rate

    rows = [
        (str(flow.source), str(flow.target), rate(flow.bandwidth))
        for flow in sorted(flows, key=lambda flow: flow.bandwidth)
    ]
    print_table(table(("from", "to", "bandwidth"), rows, left=("from", "to")))
    for fault in faults:
        answer(f"slow: {fault}")
