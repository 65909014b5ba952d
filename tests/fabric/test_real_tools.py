"""What is read from the real InfiniBand tools, and the routes derived from it, against the tools themselves.

ibsim simulates the fabric in the place of the hardware, and opensm routes it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fat_tree import fat_tree

from hpctrain.control.topology.build import read_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.summary import leaf_oversubscription

_PACKAGES = {
    "ibsim": "ibsim-utils",
    "opensm": "opensm",
    "ibnetdiscover": "infiniband-diags",
    "dump_lfts": "infiniband-diags",
}
_PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
# Two tiers with rails and oversubscription, and three tiers whose last leaf is not full.
TREES: dict[str, dict[str, Any]] = {
    "two-level": {"hosts": 22, "rails": 2, "leaf_down": 6, "leaf_up": 3, "speed": "QDR"},
    "three-level": {
        "hosts": 30,
        "leaf_down": 4,
        "leaf_up": 3,
        "levels": 3,
        "pod_leaves": 2,
        "spine_up": 2,
        "speed": "QDR",
    },
}
_PAIRS = 200
# "[5] -> switch port {0x…}[2] lid 5-5 "spine001"": leaves by port 5, arrives at spine001.
_HOP = re.compile(r'^\[([0-9]+)\] -> .* "(.*)"$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A fabric under ibsim, which opensm has brought up.

    Attributes:
        tree: what ``fat_tree`` made it of.
        folder: for files of the test.
    """

    tree: dict[str, Any]
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """What a tool prints on this fabric."""
        done = subprocess.run(
            ["ibsim-run", *command], env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="session", params=TREES)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    for tool, package in _PACKAGES.items():
        if shutil.which(tool, path=_PATH) is None:
            pytest.skip(f"no {tool}: apt-get install {package}")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "net").write_text(fat_tree(**TREES[request.param]))
    environment = {
        **os.environ,
        "PATH": _PATH,
        "IBSIM_SOCKNAME": f"hpctrain-{os.getpid()}-{request.param}",
        "OSM_TMP_DIR": str(folder),
        "OSM_CACHE_DIR": str(folder),
    }
    with (folder / "ibsim.log").open("wb") as log:
        server = subprocess.Popen(["ibsim", "-n", "-s", "net"], env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        _wait_until_ready(server, folder / "ibsim.log")
        fabric = Simulated(tree=TREES[request.param], folder=folder, environment=environment)
        assert "SUBNET UP" in fabric.run("opensm", "-F", "/dev/null", "-o", "-f", "-")
        yield fabric
    finally:
        server.kill()
        server.wait(timeout=10)


def _wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 100
    while "Network simulator ready" not in log.read_text():
        assert server.poll() is None, f"ibsim ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"ibsim is not ready after 100 s: {log.read_text()}"
        time.sleep(0.05)


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
    assert next(iter(leaf_oversubscription(fabric).values())) == tree["leaf_down"] / tree["leaf_up"]


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
