"""What is read from the real InfiniBand tools, and the routes derived from it, against the tools themselves."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.control.topology.build import read_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.levels import oversubscription
from hpctrain.control.topology.routes import Routes
from support.topology.simulated_fabric import Simulated

_PAIRS = 200
# "[5] -> switch port {0x…}[2] lid 5-5 "spine001"": leaves by port 5, arrives at spine001.
_HOP = re.compile(r'^\[([0-9]+)\] -> .* "(.*)"$', re.MULTILINE)


@pytest.fixture(scope="module")
def listings(simulated: Simulated) -> dict[str, Path]:
    """The fabric as each tool prints it, and its forwarding tables."""
    files = {}
    for command in ("ibnetdiscover", "ibnetdiscover -p", "dump_lfts"):
        files[command] = simulated.folder / command.replace(" ", "")
        files[command].write_text(simulated.run(*command.split()))
    return files


@pytest.fixture(scope="module")
def fabric(listings: dict[str, Path]) -> Fabric:
    return read_fabric(listings["ibnetdiscover"], listings["dump_lfts"])


def test_the_discovered_fabric_is_the_one_that_was_generated(simulated: Simulated, fabric: Fabric) -> None:
    tree = simulated.tree
    assert fabric.hosts == tuple(f"node{number + 1:04d}" for number in range(tree["hosts"]))
    assert [fabric.names[adapter] for adapter in fabric.adapters(0)] == [
        f"node0001 mlx5_{rail}" for rail in range(tree.get("rails", 1))
    ]
    assert len(fabric.leaves[0]) == tree.get("rails", 1)
    assert fabric.level.max() == tree.get("levels", 2)
    assert set(fabric.bandwidth) == {4e9}
    assert oversubscription(fabric)[int(np.flatnonzero(fabric.level == 1)[0])] == tree["leaf_down"] / tree["leaf_up"]


def test_a_listing_by_ports_tells_the_same_fabric(listings: dict[str, Path], fabric: Fabric) -> None:
    other = read_fabric(listings["ibnetdiscover -p"], listings["dump_lfts"])
    assert other.names == fabric.names
    assert other.hosts == fabric.hosts
    assert _cables(other) == _cables(fabric)
    for column in ("level", "subnet", "lid", "host"):
        assert getattr(other, column).tolist() == getattr(fabric, column).tolist(), column
    rows = {int(node): row for row, node in enumerate(other.table_switches)}
    assert fabric.tables is not None
    assert other.tables is not None
    for row, node in enumerate(fabric.table_switches.tolist()):
        assert (other.tables[rows[node]] == fabric.tables[row]).all()


def _cables(fabric: Fabric) -> set[tuple[int, int, int, float]]:
    return set(
        zip(
            fabric.source.tolist(),
            fabric.source_port.tolist(),
            fabric.target.tolist(),
            fabric.bandwidth.tolist(),
            strict=True,
        )
    )


def test_tables_of_single_switches_are_those_of_the_dump(
    simulated: Simulated, listings: dict[str, Path], fabric: Fabric
) -> None:
    folder = simulated.folder / "ibroute"
    folder.mkdir()
    for node in fabric.table_switches.tolist():
        (folder / f"lid-{fabric.lid[node]}").write_text(simulated.run("ibroute", str(fabric.lid[node])))
    single = read_fabric(listings["ibnetdiscover"], folder)
    assert fabric.tables is not None
    assert single.tables is not None
    order = np.argsort(fabric.table_switches), np.argsort(single.table_switches)
    assert (fabric.tables[order[0]] == single.tables[order[1]]).all()


def test_routes_are_those_that_ibtracert_prints(simulated: Simulated, fabric: Fabric) -> None:
    adapters = np.flatnonzero(fabric.level == 0).tolist()
    chosen = random.Random(0)
    pairs = np.array([chosen.sample(adapters, 2) for _ in range(_PAIRS)], np.int32)
    paths = Routes(fabric).paths(pairs[:, 0], pairs[:, 1])
    for flow, (source, target) in enumerate(pairs.tolist()):
        links = paths.link[paths.start[flow] : paths.start[flow + 1]].tolist()
        derived = [(int(fabric.source_port[link]), fabric.names[fabric.target[link]]) for link in links]
        trace = simulated.run("ibtracert", str(fabric.lid[source]), str(fabric.lid[target]))
        printed = [(int(port), name) for port, name in _HOP.findall(trace)]
        assert len(printed) >= 2, trace
        assert derived == printed, trace
