"""A simulated InfiniBand fabric that the real tools talk to: ibsim in the place of the hardware, opensm routes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.control.topology.fat_tree import fat_tree
from support.topology.simulated_fabric import Simulated

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
