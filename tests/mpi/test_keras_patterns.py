"""Each way to train with Keras comes to the same on several ranks as on one process with the full batch."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("no TensorFlow", allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "keras_patterns.py"
# How far arithmetic of fewer digits than float64's may be off.
TOLERANCE = {
    "float32": 1e-5,
    "overflow": 2e-3,
    "bfloat16": 0.02,
    "narrowed_to_fp16": 2e-3,
    "narrowed_to_bf16": 1e-2,
}
# The hardest: a step of one's own, loops, a mask, statistics and rows of the batch.
HARDEST = (
    "loop_over_a_list",
    "loop_clipped_by_hand",
    "tokens_behind_a_mask",
    "synchronized_batch_norm",
    "gradients_of_gradients",
    "train_step_of_whole_tensors",
)
# On three ranks, of which one gets nothing of the last batch.
UNEVEN = (
    *("built_in_the_first_step", "clipped_in_a_graph", "accumulated_in_a_graph", "overflow", "narrowed_to_fp16"),
    "two_optimizers_of_one_model",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], dict[str, np.ndarray]]:
    """What one process that imports no hpctrain comes to, on even or uneven batches, by these patterns or all."""
    out = tmp_path_factory.mktemp("plain") / "out"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}

    @functools.cache
    def values(kind: str, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        part = f"plain.{kind}={','.join(names)}" if names else f"plain.{kind}"
        subprocess.run([sys.executable, str(PROGRAM), str(out), part], check=True, env=env, timeout=400)
        with np.load(f"{out}-plain.{kind}-0.npz") as found:
            return dict(found)

    return values


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "backend", "names"),
    [
        (2, "horovod.even", HARDEST),
        (3, "mpi.uneven", UNEVEN),
        pytest.param(2, "mpi.uneven", (), marks=pytest.mark.thorough),
        pytest.param(3, "horovod.uneven", (), marks=pytest.mark.thorough),
    ],
)
def test_equals_one_process_on_the_full_batch(mpirun, tmp_path, plain, ranks, backend, names):
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), f"{backend}={','.join(names)}", timeout=500)
    results = [dict(np.load(tmp_path / f"out-{backend}-{rank}.npz")) for rank in range(ranks)]
    expected = plain(backend.partition(".")[2], names)
    wrong = {key: why for key in results[0] if (why := _wrong(key, results, expected))}
    assert not wrong
    assert results[0].keys() == expected.keys()


def _wrong(key: str, results: list[dict[str, np.ndarray]], plain: dict[str, np.ndarray]) -> str:
    if key not in plain:
        return str(results[0][key])
    if any(not np.array_equal(result[key], results[0][key]) for result in results):
        return "ranks differ"
    error = np.abs(results[0][key] - plain[key]).max()
    return "" if error <= TOLERANCE.get(key.partition(".")[0], 1e-10) else f"{error:.1e} off"
