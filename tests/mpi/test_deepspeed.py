"""A script of DeepSpeed runs as it is, in the process group of the run, and gives the numbers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).parent / "programs" / "deepspeed_script.py"
_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
# `make thorough` puts it beside the environment.
_BESIDE = _ROOT / ".deepspeed"

pytest.importorskip("torch")
if not _BESIDE.exists() and find_spec("deepspeed") is None:
    pytest.skip("no DeepSpeed: make .deepspeed/installed.stamp", allow_module_level=True)

# In float32, and in bfloat16, which has 8 bits: 20 steps of 1e-3 that each may round the other way.
_TOLERANCE = {"bf16": 1e-2}
CASES = ("zero1", "zero3", "accumulated", "bf16")


@pytest.mark.thorough
@pytest.mark.timeout(700)
def test_equals_one_process_on_the_full_batch(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_BESIDE}:{os.environ.get('PYTHONPATH', '')}",
        # DeepSpeed compiles its reduction of CPUs, with the ninja beside it.
        "PATH": f"{_BESIDE / 'bin'}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "HPCTRAIN_TIMEOUT": "500",
    }
    start = [_HPCTRAIN, "run", _PROGRAM, "-np", "2", "--backend", "gloo", "--run-dir", tmp_path / "run"]
    command = [*start, "--", tmp_path / "out", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by itself" not in done.stdout + done.stderr
    wanted = imported(_PROGRAM).plain()
    for case in CASES:
        with np.load(tmp_path / f"out-{case}.npz") as found:
            for name, each in wanted.items():
                np.testing.assert_allclose(found[name], each, rtol=0, atol=_TOLERANCE.get(case, 1e-4), err_msg=case)
