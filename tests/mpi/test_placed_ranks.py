"""Places of a plan, looked at from inside the ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.control.topology.live import this_node
from support.launching import Launch

# Each rank writes what it finds of its place.
_WHERE = """
import json, os, sys
found = {"cores": sorted(os.sched_getaffinity(0)), "ucx": os.environ.get("UCX_NET_DEVICES")}
with open(f"found-{os.environ['OMPI_COMM_WORLD_RANK']}.json", "w") as file:
    json.dump(found, file)
"""
CORES = [core for node in this_node().numa_nodes for core in node.cores]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nowhere else to land")


def test_ranks_of_a_run_take_their_places_as_far_as_these_are_there(hpctrain: Launch, tmp_path: Path) -> None:
    """The first rank has the last core, so that no launcher's own binding looks like it; the last has cores of another
    machine, as have all of them adapters.
    """
    rows = [("PIX\tSYS", CORES[-1]), ("SYS\tPIX", CORES[0]), ("SYS\tPIX", "4000-4003")]
    text = "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\n"
    for number, (classes, cpus) in enumerate(rows):
        links = "\t".join(" X " if number == other else "SYS" for other in range(3))
        text += f"GPU{number}\t{links}\t{classes}\t{cpus}\n"
    text += "NIC0\tPIX\tSYS\tSYS\t X \tSYS\nNIC1\tSYS\tPIX\tPIX\tSYS\t X \n"
    (tmp_path / "node.txt").write_text(text + "\nNIC Legend:\n\n  NIC0: nowhere_0\n  NIC1: nowhere_1\n")
    (tmp_path / "where.py").write_text(_WHERE)
    result = hpctrain("run", "where.py", "--node", "node.txt", "--oversubscribe", "--run-dir", "run")
    assert result.returncode == 0, result.stdout
    ranks = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    every = sorted(os.sched_getaffinity(0))
    assert [ranks[rank]["cores"] for rank in range(3)] == [[CORES[-1]], [CORES[0]], every]
    assert [ranks[rank]["ucx"] for rank in range(3)] == [None] * 3
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    places = plan["hosts"][0]["places"]
    assert [place["cores"] for place in places[:2]] == [[CORES[-1]], [CORES[0]]]
    assert [place["devices"] for place in places] == [["nowhere_0"], ["nowhere_1"], ["nowhere_1"]]
    logs = [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in range(3)]
    assert ["nowhere_0:1 " in log for log in logs] == [True] * 3
    assert ["core 4000 " in log for log in logs] == [False, False, True]
