"""Files for launchers, and places of a plan, looked at from inside the ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AS_ROOT, Launch

from hpctrain.cluster.mpi import find_mpi
from hpctrain.topology import launch_files
from hpctrain.topology.live import this_node
from hpctrain.topology.node_map import Slot

PROGRAM = Path(__file__).parent / "programs" / "where.py"
HOST = socket.gethostname()
CORES = [core for node in this_node().numa_nodes for core in node.cores]
LOGICAL = launch_files.logical_cores([node.cores for node in this_node().numa_nodes])

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nowhere else to land")


def mpirun(tmp_path: Path, *options: str) -> dict[int, dict[str, object]]:
    """What each rank found."""
    mpi = find_mpi()
    if not mpi.flavour.startswith("open-mpi"):
        pytest.skip(f"rankfiles are Open MPI's, and this is {mpi.name}")
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


@pytest.mark.parametrize("cores", [[(CORES[1],), (CORES[0],)], [tuple(CORES[:2])]], ids=["crossed", "both"])
def test_ranks_land_where_the_rankfile_says(tmp_path: Path, cores: list[tuple[int, ...]]) -> None:
    placed = [(HOST, slots(*cores))]
    rankfile, hostfile = tmp_path / "ranks", tmp_path / "hosts"
    rankfile.write_text(launch_files.open_mpi_rankfile(placed, LOGICAL))
    hostfile.write_text(launch_files.open_mpi_hostfile(placed))
    version_5 = find_mpi().flavour == "open-mpi-5"
    options = ["--map-by", f"rankfile:file={rankfile}"] if version_5 else ["--rankfile", str(rankfile)]
    ranks = mpirun(tmp_path, "-np", str(len(cores)), "--hostfile", str(hostfile), *options)
    # A core is its first thread in a node map; a rank may use all of its threads.
    assert len(ranks) == len(cores)
    for rank, each in enumerate(cores):
        assert set(each) <= set(ranks[rank]["cores"])
        assert not set(ranks[rank]["cores"]) & (set(CORES) - set(each))


def test_a_hostfile_gives_as_many_ranks_as_it_has_slots(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(launch_files.open_mpi_hostfile([(HOST, slots((), (), ()))]))
    ranks = mpirun(tmp_path, "--hostfile", str(hostfile), "--bind-to", "none")
    assert {rank: values["host"] for rank, values in ranks.items()} == dict.fromkeys(range(3), HOST)


def test_ranks_of_a_run_take_their_places(hpctrain: Launch, tmp_path: Path) -> None:
    """The first rank has the last core, so that no launcher's own binding looks like it."""
    text = f"GPU0\t X \tSYS\tSYS\tSYS\t{CORES[-1]}\t1\tN/A\nGPU1\tSYS\t X \tSYS\tSYS\t{CORES[0]}\t0\tN/A\n"
    text += "NIC0\tSYS\tSYS\t X \tSYS\nNIC1\tSYS\tSYS\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_1\n  NIC1: mlx5_10\n"
    head = "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    (tmp_path / "node.txt").write_text(head + text)
    out = tmp_path / "found"
    out.mkdir()
    result = hpctrain("run", str(PROGRAM), "--node", "node.txt", "--run-dir", "run", "--", str(out))
    assert result.returncode == 0, result.stdout
    ranks = found(out)
    assert [ranks[rank]["cores"] for rank in (0, 1)] == [[CORES[-1]], [CORES[0]]]
    assert {ranks[rank]["ucx"] for rank in (0, 1)} == {"mlx5_1:1", "mlx5_10:1"}
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [place["cores"] for place in plan["hosts"][0]["places"]] == [[CORES[-1]], [CORES[0]]]


def test_a_place_that_is_not_on_the_host(hpctrain: Launch, tmp_path: Path) -> None:
    node = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t4000-4003\t0\tN/A\n"
    (tmp_path / "node.txt").write_text(node)
    result = hpctrain("run", str(PROGRAM), "--node", "node.txt", "--run-dir", "run", "--", ".")
    assert result.returncode == 2
    assert re.search(r"rank 0 on \S+: the plan gives it core 4000", result.stdout), result.stdout
