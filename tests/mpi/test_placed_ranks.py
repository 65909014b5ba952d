"""Files for launchers, and places of a plan, looked at from inside the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.common.cluster import launch_files
from hpctrain.common.cluster.mpi import find_mpi
from hpctrain.common.cluster.node_map import Slot
from hpctrain.control.topology.live import this_node
from support.launching import AS_ROOT, Launch

PROGRAM = Path(__file__).parent / "programs" / "where.py"
HOST = socket.gethostname()
CORES = [core for node in this_node().numa_nodes for core in node.cores]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nowhere else to land")


def mpirun(tmp_path: Path, *options: str) -> dict[int, dict[str, object]]:
    """What each rank found."""
    mpi = find_mpi()
    if not mpi.flavour.startswith("open-mpi"):
        pytest.skip(f"hostfiles with slots are Open MPI's, and this is {mpi.name}")
    out = tmp_path / "found"
    out.mkdir()
    command = [str(mpi.mpirun), *options, sys.executable, str(PROGRAM), str(out)]
    environment = {**os.environ, **AS_ROOT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return found(out)


def found(out: Path) -> dict[int, dict[str, object]]:
    return {int(path.stem): json.loads(path.read_text()) for path in out.iterdir()}


def slots(*cores: tuple[int, ...]) -> list[Slot]:
    return [Slot(gpu=None, adapter=None, cores=each) for each in cores]


def test_a_hostfile_gives_as_many_ranks_as_it_has_slots(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(launch_files.open_mpi_hostfile([(HOST, slots((), (), ()))]))
    ranks = mpirun(tmp_path, "--hostfile", str(hostfile), "--bind-to", "none")
    assert {rank: values["host"] for rank, values in ranks.items()} == dict.fromkeys(range(3), HOST)


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
    out = tmp_path / "found"
    out.mkdir()
    options = ("--node", "node.txt", "--oversubscribe", "--run-dir", "run")
    result = hpctrain("run", str(PROGRAM), *options, "--", str(out))
    assert result.returncode == 0, result.stdout
    ranks = found(out)
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
