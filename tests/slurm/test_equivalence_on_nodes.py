"""The MPI engine on four nodes of a real Slurm with two ranks each: little on the network.

That the parameters are those of one process is in tests/hosts/test_engine.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

pytest.importorskip("torch")

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
PROGRAM = Path(__file__).parents[1] / "mpi" / "programs" / "torch_on_nodes.py"
NODES, RANKS = 4, 8
# What may go wrong between nodes alone: the sum of slices, its types, what travels narrowed, tiny and large buffers.
CASES = ("momentum", "one_bucket", "odd", "bfloat16", "wire_fp16")


@pytest.mark.long
def test_a_node_sends_what_a_single_rank_in_its_place_would(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Each byte of the sums leaves a node once in each half of the all-reduce, however many ranks the node has."""
    command = (HPCTRAIN, "run", str(PROGRAM), "--backend", "mpi", "--launcher", "mpirun", "--run-dir", "run")
    allocation = ("salloc", f"-N{NODES}", f"-n{RANKS}", f"--chdir={tmp_path}")
    said = slurm.run(*allocation, *command, "--", str(tmp_path / "out"), *CASES, check=False, timeout=180, **AS_ROOT)
    files = [tmp_path / f"out-{rank}.npz" for rank in range(RANKS)]
    assert all(file.exists() for file in files), said
    results = [dict(np.load(file)) for file in files]
    assert [int(found["nodes"]) for found in results] == [NODES] * RANKS
    nodes = sorted({tuple(found["node"].tolist()) for found in results})
    assert nodes == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for name in CASES:
        assert all(np.array_equal(found[name], results[0][name]) for found in results), f"{name}: ranks differ"
        sent = [sum(int(results[rank][f"{name} sent"]) for rank in node) for node in nodes]
        reduced = int(results[0][f"{name} reduced"])
        assert sum(sent) == 2 * (NODES - 1) * reduced, name
        # Not exactly equal: where elements do not divide over the nodes, the last has fewer to add up.
        assert sent == pytest.approx([2 * (NODES - 1) / NODES * reduced] * NODES, rel=0.05), name
