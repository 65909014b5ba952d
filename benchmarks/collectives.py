"""Predicted all-reduces against SimGrid: the same links and routes, but messages that wait for nothing but each other.

    python benchmarks/collectives.py [--small] [--seed N] [--fabrics DIR] [--json]

Compares on listings of real fabrics (in DIR) and on generated fat trees with three levels, tapered 2:1 and 4:1. For
each set of hosts, five orders: ``given``, hosts of the leaves in turn; ``random``; ``name``; ``tree``, depth-first over
the switch tree; ``placed``. Buffers are large and links without latency, so that what is compared is contention.

Of long runs of equal steps the first ones are simulated, and as many are predicted. SimGrid is Debian's
python3-simgrid, which the system's Python runs (benchmarks/simgrid_flows.py).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from fat_tree import fat_tree
from other_allreduces import halving_doubling, hierarchical, ring
from sharing import overlapped_allreduce

from hpctrain.control.predict.network import network_of, usual_hosts
from hpctrain.control.topology.build import build_fabric, read_fabric
from hpctrain.control.topology.fabric import Fabric, Ints
from hpctrain.control.topology.placement import rail_adapters, report
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import (
    Phase,
    Routes,
    double_tree,
    parents,
    predict_allreduce,
    rail_rings,
    second_parents,
)

# Where the plain formulas are.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.report.network_times import tree_seconds

SYSTEM_PYTHON = "/usr/bin/python3"
PROGRAM = Path(__file__).with_name("simgrid_flows.py")
FABRICS = Path(__file__).parents[2] / "shared" / "data" / "fabrics"
ORDERS = ("given", "random", "name", "tree", "placed")
COLLECTIVES = ("ring", "rail rings", "halving-doubling", "hierarchical", "tree")

SIZE = 1e9
# Hosts that reduce among themselves first, in a hierarchical all-reduce.
GROUP = 4
# Messages of one simulated all-reduce, of which SimGrid's Python binding does about 3,000 a second; at least this many
# steps or pieces of a tree are run.
MESSAGES = 1500
FEWEST = 6
# Two trees of more hosts are more messages than a run of minutes has.
TREE_HOSTS = 256

Actor = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective over one set of hosts, in five orders.

    Attributes:
        predicted, simulated: seconds, in the order of ``ORDERS``.
    """

    fabric: str
    hosts: int
    collective: str
    predicted: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each order: predicted to simulated, less one."""
        return tuple(said / seen - 1 for said, seen in zip(self.predicted, self.simulated, strict=True))

    @property
    def ranked_alike(self) -> bool:
        """Whether no two orders are predicted the wrong way round, or alike where they differ by over 5 %.

        Simulated times within 1 % are alike.
        """
        for one, other in combinations(range(len(ORDERS)), 2):
            seen, said = (times[one] / times[other] - 1 for times in (self.simulated, self.predicted))
            alike = abs(said) < 1e-6
            if abs(seen) > 0.01 and (abs(seen) > 0.05 if alike else seen * said < 0):
                return False
        return True


def tapered(hosts: int, taper: int) -> Fabric:
    """Pods of four leaves with eight hosts each; each level up has the ``taper``-th part of the cables."""
    up = 8 // taper
    listing = fat_tree(hosts=hosts, leaf_down=8, leaf_up=up, levels=3, pod_leaves=4, spine_up=max(1, 4 // taper))
    return build_fabric(ibnetdiscover.read(listing, "generated"))


def fabrics(folder: Path, *, small: bool) -> Iterator[tuple[str, Fabric, tuple[int, ...]]]:
    """The name of each fabric, itself, and the sizes of the sets of hosts."""
    yield "fat tree 2:1", tapered(128, 2), (16, 32) if small else (16, 64, 128)
    yield "fat tree 4:1", tapered(128, 4), (16,) if small else (32, 128)
    if not small:
        yield "fat tree 4:1, of 512", tapered(512, 4), (256, 512)
    if folder.is_dir():
        yield "dgx-ndr-119", read_fabric(folder / "dgx-ndr-119.ibnetdiscover"), (16,) if small else (16, 64)
        avakas = folder / "avakas"
        yield "avakas", read_fabric(avakas / "ibnetdiscover-p.txt", avakas / "ibroutes"), (32,) if small else (32, 128)


def orders(fabric: Fabric, hosts: Sequence[int], seed: int) -> dict[str, list[int]]:
    """The hosts in each of ``ORDERS``."""
    by_leaf = defaultdict(list)
    for host in hosts:
        by_leaf[min(fabric.leaves[host])].append(host)
    turns = [[hosts[place] for hosts in by_leaf.values() if place < len(hosts)] for place in range(len(hosts))]
    in_turn = [host for turn in turns for host in turn]
    found = report(fabric, in_turn, seed=seed)
    return {
        "given": in_turn,
        "random": random.Random(seed).sample(in_turn, len(in_turn)),
        "name": list(found.name.order),
        "tree": list(found.tree.order),
        "placed": list(found.placed.order),
    }


def phases(collective: str, adapters: Ints) -> list[Phase]:
    """The phases of a collective over adapters, (hosts, rails), with the steps that are simulated.

    All but the rings of rails take the first rail. Hosts that are left over in groups take no part.
    """
    first = adapters[:, 0]
    whole = len(first) // GROUP * GROUP
    made = {
        "ring": lambda: ring(first),
        "rail rings": lambda: rail_rings(adapters),
        "halving-doubling": lambda: halving_doubling(first),
        "hierarchical": lambda: hierarchical(first[:whole].reshape(-1, GROUP)),
        "tree": lambda: double_tree(first[:, None]),
    }[collective]()
    return [replace(phase, repeats=min(phase.repeats, most(len(phase.source)))) for phase in made]


def most(flows: int) -> int:
    """Steps of so many flows, or pieces of a tree, that are simulated."""
    return max(FEWEST, MESSAGES // flows)


def pieces(hosts: int) -> int:
    """The pieces of each half in the trees: eight for each edge of their height, as in NCCL for large buffers
    (https://github.com/NVIDIA/nccl, src/enqueue.cc); for many hosts fewer, so that filling the trees
    takes more of the time.
    """
    return max(most(4 * (hosts - 1)), (8 if hosts <= 64 else 2) * hosts.bit_length())


def predict(routes: Routes, collective: str, steps: list[Phase], order: Sequence[int]) -> float:
    """Seconds, as hpctrain predicts them."""
    if collective == "tree":
        network = network_of(routes, order, adapters_per_host=1)
        return tree_seconds(network, SIZE, piece_bytes=SIZE / 2 / pieces(len(order)))
    if collective == "halving-doubling":
        return overlapped_allreduce(routes, steps, SIZE)
    return predict_allreduce(routes, steps, SIZE)


def actors_of(steps: Sequence[Phase]) -> list[Actor]:
    """One actor an adapter, with a step for each phase in which it sends or receives."""
    actors: dict[int, list[Actor]] = defaultdict(list)
    for phase in steps:
        own: dict[int, Actor] = {}
        for sender, receiver in zip(phase.source.tolist(), phase.target.tolist(), strict=True):
            for end in (sender, receiver):
                own.setdefault(end, {"kind": "exchange", "repeats": phase.repeats, "send": [], "receive": []})
            own[sender]["send"].append([receiver, int(SIZE * phase.share), ""])
            own[receiver]["receive"].append([sender, ""])
        for adapter, step in own.items():
            actors[adapter].append(step)
    return [{"adapter": adapter, "steps": own} for adapter, own in actors.items()]


def tree_actors(adapters: Ints) -> list[Actor]:
    """Two actors an adapter and tree, one up and one down; the root of each hands down what it has received."""
    count = pieces(len(adapters))
    size, names = int(SIZE / 2 / count), adapters.tolist()
    actors = []
    for tree, parent in enumerate((parents(len(adapters)).tolist(), second_parents(len(adapters)).tolist())):
        children = defaultdict(list)
        for child, above in enumerate(parent):
            children[above].append(names[child])
        for host, above in enumerate(parent):
            up = [[child, f"up {tree}"] for child in children[host]]
            down = [[child, size, f"down {tree}"] for child in children[host]]
            ways = [(up, down)]
            if above >= 0:
                ways = [(up, [[names[above], size, f"up {tree}"]]), ([[names[above], f"down {tree}"]], down)]
            actors += [
                {
                    "adapter": names[host],
                    "steps": [{"kind": "relay", "repeats": count, "receive": received, "send": sent}],
                }
                for received, sent in ways
            ]
    return actors


def simulate(routes: Routes, runs: Sequence[Sequence[Actor]]) -> list[float]:
    """Seconds of each run in SimGrid, on the links that its messages take."""
    pairs = sorted(
        {
            (actor["adapter"], receiver)
            for actors in runs
            for actor in actors
            for step in actor["steps"]
            for receiver, *_ in step["send"]
        }
    )
    source, target = np.array(pairs, np.int32).T
    paths = routes.paths(source, target)
    taken, link = np.unique(paths.link, return_inverse=True)
    ways = np.split(link, paths.start[1:-1])
    task = {
        "bandwidth": routes.fabric.bandwidth[taken].tolist(),
        "routes": [[*pair, way.tolist()] for pair, way in zip(pairs, ways, strict=True)],
        "runs": runs,
    }
    done = subprocess.run(
        [SYSTEM_PYTHON, str(PROGRAM)], input=json.dumps(task), capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nhas {SYSTEM_PYTHON} simgrid? apt-get install python3-simgrid")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def compare(name: str, fabric: Fabric, count: int, seed: int) -> Iterator[Case]:
    """All collectives over a random set of hosts, as a scheduler on a busy cluster hands it out."""
    usual = usual_hosts(fabric)
    hosts = random.Random(seed).sample(usual, count)
    listed = orders(fabric, hosts, seed)
    rows = {order: rail_adapters(fabric, own) for order, own in listed.items()}
    routes = Routes(fabric)
    for collective in COLLECTIVES:
        one_rail = rows["given"].shape[1] == 1
        if (collective == "rail rings" and one_rail) or (collective == "tree" and count > TREE_HOSTS):
            continue
        steps = [phases(collective, rows[order]) for order in ORDERS]
        runs = [
            tree_actors(rows[order][:, 0]) if collective == "tree" else actors_of(each)
            for order, each in zip(ORDERS, steps, strict=True)
        ]
        yield Case(
            fabric=name,
            hosts=count,
            collective=collective,
            predicted=tuple(
                predict(routes, collective, each, listed[order]) for order, each in zip(ORDERS, steps, strict=True)
            ),
            simulated=tuple(simulate(routes, runs)),
        )


def row(case: Case) -> str:
    worst = max(case.errors, key=abs)
    times = " | ".join(f"{said:.4g} / {seen:.4g}" for said, seen in zip(case.predicted, case.simulated, strict=True))
    alike = "yes" if case.ranked_alike else "no"
    return f"| {case.fabric} | {case.hosts} | {case.collective} | {times} | {worst:+.1%} | {alike} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few sets of few hosts: about half a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the sets of hosts and their random order")
    parser.add_argument("--fabrics", type=Path, default=FABRICS, metavar="DIR", help="listings of real fabrics")
    parser.add_argument("--json", action="store_true", help="one JSON list of all cases")
    arguments = parser.parse_args()
    began = time.perf_counter()
    cases = []
    if not arguments.json:
        print(f"| fabric | hosts | collective | {' | '.join(ORDERS)} | worst error | same ranking |")
        print("|---|--:|---|" + "--:|" * (len(ORDERS) + 1) + "---|")
    for name, fabric, sizes in fabrics(arguments.fabrics, small=arguments.small):
        for size in sizes:
            for case in compare(name, fabric, size, arguments.seed):
                cases.append(case)
                if not arguments.json:
                    print(row(case), flush=True)
    if arguments.json:
        keys = ("fabric", "hosts", "collective", "predicted", "simulated", "errors", "ranked_alike")
        print(json.dumps([{key: getattr(case, key) for key in keys} for case in cases]))
        return
    errors = sorted(abs(error) for case in cases for error in case.errors)
    print(f"\n{len(errors)} all-reduces: median error {errors[len(errors) // 2]:.2%}, worst {errors[-1]:.1%}, ", end="")
    print(f"within 10 %: {np.mean(np.array(errors) <= 0.1):.0%}; ", end="")
    print(f"ranked alike: {sum(case.ranked_alike for case in cases)} of {len(cases)} sets of five", end="")
    print(f"; {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print()


if __name__ == "__main__":
    main()
