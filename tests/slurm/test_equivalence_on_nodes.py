"""The MPI engine on four nodes of a real Slurm with two ranks each: the right parameters, and little on the network."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported
from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

pytest.importorskip("torch")

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
PROGRAM = Path(__file__).parents[1] / "mpi" / "programs" / "torch_on_nodes.py"
NODES, RANKS = 4, 8
# What may go wrong between nodes alone: the sum of slices, its types, what travels narrowed, tiny and large buffers.
CASES = ("momentum", "adam", "one_bucket", "odd", "float32", "bfloat16", "wire_fp16")


@pytest.fixture(scope="module")
def results(slurm: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What each of the ranks found; one job for all tests."""
    folder = tmp_path_factory.mktemp("nodes")
    command = (HPCTRAIN, "run", str(PROGRAM), "--backend", "mpi", "--launcher", "mpirun", "--run-dir", "run")
    allocation = ("salloc", f"-N{NODES}", f"-n{RANKS}", f"--chdir={folder}")
    said = slurm.run(*allocation, *command, "--", str(folder / "out"), *CASES, check=False, timeout=180, **AS_ROOT)
    files = [folder / f"out-{rank}.npz" for rank in range(RANKS)]
    assert all(file.exists() for file in files), said
    return [dict(np.load(file)) for file in files]


@pytest.mark.thorough
def test_eight_ranks_on_four_nodes_equal_one_process(results: list[dict[str, np.ndarray]]) -> None:
    program = imported(PROGRAM.with_name("torch_equivalence.py"))
    for name in CASES:
        reference = program.reference(name)
        assert np.isfinite(reference).all()
        for found in results:
            np.testing.assert_array_equal(found[name], results[0][name], err_msg=f"{name}: ranks differ")
        error = np.abs(results[0][name] - reference).max()
        assert error <= program.TOLERANCE.get(name, 1e-10), f"{name}: {error}"


@pytest.mark.long
def test_a_node_sends_what_a_single_rank_in_its_place_would(results: list[dict[str, np.ndarray]]) -> None:
    """Each byte of the sums leaves a node once in each half of the all-reduce, however many ranks the node has."""
    assert [int(found["nodes"]) for found in results] == [NODES] * RANKS
    nodes = sorted({tuple(found["node"].tolist()) for found in results})
    assert nodes == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for name in CASES:
        sent = [sum(int(results[rank][f"{name} sent"]) for rank in node) for node in nodes]
        reduced = int(results[0][f"{name} reduced"])
        assert sum(sent) == 2 * (NODES - 1) * reduced, name
        # Not exactly equal: where elements do not divide over the nodes, the last has fewer to add up.
        assert sent == pytest.approx([2 * (NODES - 1) / NODES * reduced] * NODES, rel=0.05), name
