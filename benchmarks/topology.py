"""What placement gains on real fabrics, and how reading and placing grow with a fabric.

    python benchmarks/topology.py subsets FABRIC [--routes DIR]
    python benchmarks/topology.py mesh FABRIC [--routes DIR]
    python benchmarks/topology.py growth

``subsets`` draws random sets of hosts, as a scheduler on a busy cluster hands them out, and prints means over them of
crossings, of the worst link's load and of the predicted bandwidth of all-reduces: for hosts in random order, sorted by
name, depth-first over the switch tree, and placed. ``mesh`` lays tp 8 x pp 4 x dp_shard 16 over as many sets of 64
hosts with 8 ranks each, and prints what is sent over leaves in a step of the model of ``topology place --mesh``.
``growth`` generates fat trees of three levels with 8 rails a host, and times a process that reads the listing of one,
builds the fabric, places its hosts from a random order and writes a hostfile.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from fat_tree import fat_tree

from hpctrain.common.cluster.launch_files import open_mpi_hostfile
from hpctrain.common.cluster.node_map import Slot
from hpctrain.common.recipes.mesh import parse_mesh
from hpctrain.common.recipes.mesh_traffic import ORDERS as MESH_ORDERS
from hpctrain.common.recipes.mesh_traffic import LaidMesh
from hpctrain.control.topology.build import read_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.mesh_flows import published_work
from hpctrain.control.topology.mesh_layout import lay
from hpctrain.control.topology.placement import PlacementReport, report

ORDERS = ("given", "name", "tree", "placed")
DRAWS = 200


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def usual_hosts(fabric: Fabric) -> list[int]:
    """The hosts with the usual number of adapters above one, if any: one host with fewer cuts every ring's rails."""
    adapters = Counter(host for host in fabric.host.tolist() if host >= 0)
    usual = Counter(adapters.values())
    several = {count: hosts for count, hosts in usual.items() if count > 1} or usual
    most = max(several, key=lambda count: several[count])
    return [host for host, count in adapters.items() if count == most]


def subsets(path: Path, routes: Path | None) -> None:
    fabric = read_fabric(path, routes)
    hosts = usual_hosts(fabric)
    rails = len(fabric.adapters(hosts[0]))
    tables = "its own tables" if fabric.tables is not None else "minimum-hop tables"
    print(f"{path.name}: {DRAWS} random subsets of {len(hosts)} hosts with {rails} adapters, {tables}\n")
    print("| hosts | | random | sorted | depth-first | placed | bound | sorted already optimal |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for size in (32, 64):
        choose = random.Random(size)
        reports = [report(fabric, choose.sample(hosts, size)) for _ in range(DRAWS)]
        as_good = [
            (found.name.worst_load, found.name.crossings) <= (found.placed.worst_load, found.placed.crossings)
            for found in reports
        ]
        print(
            row(size, "crossings", reports, "crossings"), f"{mean([found.bound for found in reports]):.1f} |", end=" "
        )
        print(f"{mean(as_good):.0%} |")
        floors = [slowest(fabric, found) for found in reports]
        print(row(size, "worst load", reports, "worst_load"), f"{mean(floors):.2f} | |")
        print(row(size, "GB/s", reports, "bandwidth_bytes_per_s", unit=1e9), " | |")


def slowest(fabric: Fabric, found: PlacementReport) -> float:
    """The worst load that no order is under: one flow on the slowest cable of the hosts' own."""
    cables = np.isin(fabric.source, np.concatenate([fabric.adapters(host) for host in found.given.order]))
    return float(fabric.bandwidth[cables].max() / fabric.bandwidth[cables].min())


def row(size: int, title: str, reports: list[PlacementReport], value: str, unit: float = 1.0) -> str:
    means = [mean([getattr(getattr(found, order), value) / unit for found in reports]) for order in ORDERS]
    return f"| {size} | {title} | " + " | ".join(f"{number:.2f}" for number in means) + " |"


def mesh(path: Path, routes: Path | None) -> None:
    fabric = read_fabric(path, routes)
    choose, hosts = random.Random(0), usual_hosts(fabric)
    work = published_work(parse_mesh("tp=8,pp=4,dp_shard=16").at(512))
    print(
        f"{path.name}: {DRAWS} random sets of 64 of {len(hosts)} hosts with {len(fabric.adapters(hosts[0]))} adapters\n"
    )
    found: dict[str, list[LaidMesh]] = {name: [] for name in MESH_ORDERS}
    for _ in range(DRAWS):
        given = choose.sample(hosts, 64)
        laid = lay(fabric, given, report(fabric, given).placed.order, dict.fromkeys(given, 8), work)
        for name, order in laid.traffic.orders.items():
            found[name].append(order)
    print(
        "| order of ranks | TB over leaves | least | most | of pp | of dp_shard | busiest link, s | busier than given |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, orders in found.items():
        over = [order.over_leaves / 1e12 for order in orders]
        along = {
            axis: mean([sum(each.levels[2:]) / 1e12 for order in orders for each in order.axes if each.axis == axis])
            for axis in ("pp", "dp_shard")
        }
        seconds = [order.busiest_seconds or 0.0 for order in orders]
        axes = " | ".join(f"{along[axis]:.2f}" for axis in ("pp", "dp_shard"))
        title = f"| {MESH_ORDERS[name]} | {mean(over):.2f} | {min(over):.2f} | {max(over):.2f} |"
        busier = mean(
            [own > (other.busiest_seconds or 0.0) for own, other in zip(seconds, found["given"], strict=True)]
        )
        print(f"{title} {axes} | {mean(seconds):.2f} | {busier:.0%} |")


def growth() -> None:
    print("| hosts | adapters | switches | read and build s | place s | hostfile s | in all s | peak MiB |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for hosts in (256, 512, 1024, 2048):
            listing = Path(folder) / f"{hosts}.ibnetdiscover"
            listing.write_text(fat_tree(hosts=hosts, rails=8, leaf_down=32, leaf_up=32, levels=3))
            # A process each, so that the peak of memory is its own.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                print(pool.submit(measure, listing).result(), flush=True)


def measure(listing: Path) -> str:
    """One row of the table of growth."""
    began = time.perf_counter()
    fabric = read_fabric(listing)
    built = time.perf_counter()
    hosts = random.Random(0).sample(range(len(fabric.hosts)), len(fabric.hosts))
    order = report(fabric, hosts).placed.order
    placed = time.perf_counter()
    slots = [Slot(gpu=gpu, adapter=f"mlx5_{gpu}", cores=()) for gpu in range(8)]
    listing.with_suffix(".hostfile").write_text(open_mpi_hostfile([(fabric.hosts[host], slots) for host in order]))
    written = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = " | ".join(f"{s:.2f}" for s in (built - began, placed - built, written - placed, written - began))
    adapters, switches = (fabric.level == 0).sum(), (fabric.level > 0).sum()
    return f"| {len(hosts)} | {adapters} | {switches} | {seconds} | {peak:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawn = commands.add_parser("subsets")
    meshes = commands.add_parser("mesh")
    for each in (drawn, meshes):
        each.add_argument("fabric", type=Path)
        each.add_argument("--routes", type=Path, help="forwarding tables: a folder of ibroute outputs, or dump_lfts")
    commands.add_parser("growth")
    arguments = parser.parse_args()
    if arguments.command == "subsets":
        subsets(arguments.fabric, arguments.routes)
    elif arguments.command == "mesh":
        mesh(arguments.fabric, arguments.routes)
    else:
        growth()


if __name__ == "__main__":
    main()
