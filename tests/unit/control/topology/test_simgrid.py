"""Predicted all-reduces against SimGrid: another program's fat tree, routing and sharing of links."""

import json
import math
import random
import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from fat_tree import fat_tree
from other_allreduces import halving_doubling, ring

from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.placement import report
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import Routes, predict_allreduce

PROGRAM = Path(__file__).parent / "programs" / "simgrid_allreduce.py"
SYSTEM_PYTHON = "/usr/bin/python3"
SIZE = 1e9

# A tree as hpctrain generates it and as SimGrid writes it: "levels; children of each; parents of each; cables".
TREES = {
    "full": ({"hosts": 16, "leaf_down": 4, "leaf_up": 4}, "2;4,4;1,4;1,1"),
    "oversubscribed 4:1": ({"hosts": 24, "leaf_down": 8, "leaf_up": 2}, "2;8,3;1,2;1,1"),
    "three levels, oversubscribed 2:1 twice": (
        {"hosts": 24, "leaf_down": 4, "leaf_up": 2, "levels": 3, "pod_leaves": 2, "spine_up": 1},
        "3;4,2,3;1,2,1;1,1,1",
    ),
}

PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="tree" prefix="h" suffix="" radical="0-{last}" speed="1Gf" bw="{bandwidth}Bps" lat="0us"
           topology="FAT_TREE" topo_parameters="{tree}" sharing_policy="SPLITDUPLEX"/>
</platform>
"""


@pytest.fixture(scope="module")
def simgrid() -> None:
    found = Path(SYSTEM_PYTHON).exists() and subprocess.run(
        [SYSTEM_PYTHON, "-c", "import simgrid"], capture_output=True, check=False
    )
    if not found or found.returncode:
        pytest.skip(f"{SYSTEM_PYTHON} has no simgrid: apt install python3-simgrid")


@pytest.mark.long
@pytest.mark.usefixtures("simgrid")
@pytest.mark.parametrize("name", TREES)
def test_simgrid_measures_what_is_predicted_and_ranks_placements_the_same(name: str, tmp_path: Path) -> None:
    shape, tree = TREES[name]
    fabric = build_fabric(ibnetdiscover.read(fat_tree(**shape), "generated"))
    hosts = list(range(shape["hosts"]))
    leaves = [hosts[start :: shape["leaf_down"]] for start in range(shape["leaf_down"])]
    orders = [
        list(report(fabric, hosts).placed.order),
        [host for across in leaves for host in across],
        *(random.Random(seed).sample(hosts, len(hosts)) for seed in range(3)),
    ]

    routes = Routes(fabric)
    adapters = np.concatenate([fabric.adapters(host) for host in hosts])
    predicted = [predict_allreduce(routes, ring(adapters[order]), SIZE) for order in orders]
    simulated = simulate(tmp_path, tree, "ring", orders, bandwidth=fabric.bandwidth[0])

    assert predicted == pytest.approx(simulated, rel=0.1)
    assert len({round(seconds / predicted[0], 3) for seconds in predicted}) > 1, "placements that differ in nothing"
    for one, other in combinations(range(len(orders)), 2):
        if predicted[one] != pytest.approx(predicted[other], rel=0.01):
            assert (predicted[one] < predicted[other]) == (simulated[one] < simulated[other])


@pytest.mark.usefixtures("simgrid")
def test_simgrid_measures_what_is_predicted_of_halving_and_doubling(tmp_path: Path) -> None:
    shape, tree = TREES["oversubscribed 4:1"]
    fabric = build_fabric(ibnetdiscover.read(fat_tree(**shape), "generated"))
    adapters = np.flatnonzero(fabric.level == 0).astype(np.int32)
    orders = [random.Random(seed).sample(range(shape["hosts"]), 16) for seed in range(5)]
    predicted = [predict_allreduce(Routes(fabric), halving_doubling(adapters[order]), SIZE) for order in orders]
    simulated = simulate(tmp_path, tree, "halving_doubling", orders, bandwidth=fabric.bandwidth[0])
    assert predicted == pytest.approx(simulated, rel=0.1)


def simulate(folder: Path, tree: str, pattern: str, orders: list[list[int]], *, bandwidth: float) -> list[float]:
    """Seconds of each all-reduce in SimGrid."""
    platform = folder / "platform.xml"
    last = math.prod(int(children) for children in tree.split(";")[1].split(",")) - 1
    platform.write_text(PLATFORM.format(last=last, bandwidth=bandwidth, tree=tree))
    task = json.dumps({"pattern": pattern, "bytes": SIZE, "orders": orders})
    done = subprocess.run(
        [SYSTEM_PYTHON, str(PROGRAM), str(platform), task], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
