"""PyTorch on 1 to 4 ranks gives the parameters of one plain process on the full batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "torch_equivalence.py"


program = imported(PROGRAM)
EAGER = [name for name, case in program.CASES.items() if not case.compiled]


@pytest.fixture(scope="module")
def references() -> dict[str, np.ndarray]:
    found = {name: program.reference(name) for name in EAGER}
    # A compiled model is to equal an eager one.
    return {**found, "compiled": found["momentum"]}


# What depends on the number of ranks.
CORE = ["momentum", "adamw", "clip", "accumulate3", "odd", "sparse_embedding", "wire_fp16"]
REST = [name for name in EAGER if name not in CORE]


# Three ranks do everything: 17 samples do not divide over them, and of a batch of 2 one rank gets none.
@pytest.mark.parametrize(
    ("ranks", "backends"),
    [
        pytest.param(1, {"mpi": CORE}, marks=pytest.mark.thorough),
        pytest.param(2, {"mpi": CORE, "horovod": CORE}, marks=pytest.mark.thorough),
        pytest.param(2, {"mpi": ["compiled"], "horovod": ["compiled"]}, marks=pytest.mark.long),
        # Three ranks have these, which do not depend on the number, on every change.
        pytest.param(2, {"mpi": REST}, marks=pytest.mark.thorough),
        (3, {"mpi": EAGER, "horovod": CORE, "gloo": CORE}),
        pytest.param(3, {"horovod": REST, "gloo": REST}, marks=pytest.mark.thorough),
        pytest.param(4, {"mpi": CORE}, marks=pytest.mark.thorough),
    ],
)
def test_equals_one_process_on_the_full_batch(mpirun, tmp_path, references, ranks, backends):
    parts = [f"{backend}={','.join(cases)}" for backend, cases in backends.items()]
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), *parts, timeout=400)
    for backend, cases in backends.items():
        _compare([np.load(tmp_path / f"out-{backend}-{rank}.npz") for rank in range(ranks)], references, cases)


def _compare(results, references, cases):
    for name in cases:
        assert np.isfinite(references[name]).all()
        for result in results:
            np.testing.assert_array_equal(result[name], results[0][name], err_msg=f"{name}: ranks differ")
        error = np.abs(results[0][name] - references[name]).max()
        assert error <= program.TOLERANCE.get(name, 1e-10), f"{name}: {error}"
