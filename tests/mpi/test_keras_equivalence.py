"""Keras on 1 to 4 ranks gives the weights of one plain process on the full batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("no TensorFlow", allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "keras_equivalence.py"
# Sums in another order, in arithmetic of fewer digits than float64's.
TOLERANCE = {
    "float32": 1e-5,
    "overflow": 2e-3,
    "overflow_graph": 2e-3,
    "bfloat16": 0.02,
    "wire_fp16": 2e-3,
    "wire_bf16": 1e-2,
}
CORE = ("momentum", "nesterov_built_later", "adam", "adamw", "clipped", "accumulated_2", "accumulated_3")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, np.ndarray]:
    """One process that imports no hpctrain."""
    out = tmp_path_factory.mktemp("plain") / "out"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run([sys.executable, str(PROGRAM), str(out), "plain"], check=True, env=env, timeout=300)
    with np.load(f"{out}-plain-0.npz") as cases:
        return dict(cases)


# What a reduction may do wrong beside the mean: types, loss scaling, what travels narrowed, gradients of rows.
TYPES = ("float32", "embedding", "overflow", "overflow_graph", "bfloat16", "wire_fp16", "wire_bf16")


# Three ranks can do everything: 17 samples do not divide over them, and of a batch of 2 one rank gets none.
@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "backends"),
    [
        pytest.param(1, {"mpi": ("momentum", "adam", "accumulated_2")}, marks=pytest.mark.thorough),
        pytest.param(2, {"mpi": CORE}, marks=pytest.mark.thorough),
        (3, {"mpi": (*CORE, "embedding", "overflow", "wire_fp16"), "horovod": ("momentum", "accumulated_2")}),
        pytest.param(3, {"mpi": (), "horovod": ("momentum", "accumulated_2", *TYPES)}, marks=pytest.mark.thorough),
        pytest.param(4, {"mpi": ("momentum", "adam", "accumulated_2")}, marks=pytest.mark.thorough),
    ],
)
def test_equals_one_process_on_the_full_batch(mpirun, tmp_path, plain, ranks, backends):
    parts = [f"{backend}={','.join(cases)}" for backend, cases in backends.items()]
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), *parts, timeout=500)
    for backend, cases in backends.items():
        results = [np.load(tmp_path / f"out-{backend}-{rank}.npz") for rank in range(ranks)]
        assert set(results[0].files) == set(cases or plain)
        _compare(results, plain)


def _compare(results, plain):
    for name in results[0].files:
        assert np.isfinite(plain[name]).all()
        for result in results:
            np.testing.assert_array_equal(result[name], results[0][name], err_msg=f"{name}: ranks differ")
        error = np.abs(results[0][name] - plain[name]).max()
        assert error <= TOLERANCE.get(name, 1e-10), f"{name}: {error}"


@pytest.mark.long
def test_the_case_of_an_overflow_has_one(plain):
    assert plain["overflow"][-1] < 2.0**15
