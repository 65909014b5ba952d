"""DeepSpeed's own scripts under hpctrain, against one process without it; no compiler runs, and no lock is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.refusals import check, codes

_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).parent / "programs" / "deepspeed_script.py"
_HPCTRAIN = Path(sys.executable).parent / "hpctrain"
# `make test` puts it beside the environment.
_BESIDE = _ROOT / ".deepspeed"

pytest.importorskip("torch")
if not _BESIDE.exists() and find_spec("deepspeed") is None:
    pytest.skip("no DeepSpeed: make .deepspeed/installed.stamp", allow_module_level=True)

# In float32, and in bfloat16, which has 8 bits: 20 steps of 1e-3 that each may round the other way.
_TOLERANCE = {"bf16": 1e-2}
_COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "nvcc", "ninja")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With compilers that only say that they were called, and a folder of its own for what they would make."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in _COMPILERS:
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/compiled\nexit 1\n')
        program.chmod(0o755)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{_BESIDE}:{os.environ.get('PYTHONPATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "HPCTRAIN_TIMEOUT": "120",
    }


def _run(environment: dict[str, str], folder: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    start = [_HPCTRAIN, "run", _PROGRAM, "-np", "2", "--backend", "deepspeed", "--run-dir", folder / "run"]
    command = [*start, "--", folder / "out", *cases]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)


def _check_nothing_compiled(folder: Path) -> None:
    compiled = folder / "compiled"
    assert not compiled.exists(), compiled.read_text()
    assert not (folder / "extensions").exists()


def _weights(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.long
def test_equals_one_process_on_the_full_batch(tmp_path: Path, environment: dict[str, str]) -> None:
    cases = ("zero1", "zero2", "zero3", "accumulated", "clipped", "bf16")
    done = _run(environment, tmp_path, *cases, "refused")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by itself" not in done.stdout + done.stderr
    subprocess.run([sys.executable, _PROGRAM, tmp_path / "out", "plain"], check=True, timeout=100)
    for case in cases:
        wanted = _weights(tmp_path / f"out-plain{'-clipped' if case == 'clipped' else ''}.npz")
        found = _weights(tmp_path / f"out-{case}.npz")
        for name, each in wanted.items():
            np.testing.assert_allclose(found[name], each, rtol=0, atol=_TOLERANCE.get(case, 1e-4), err_msg=case)
    _check_refusals(json.loads((tmp_path / "out-refused.json").read_text()), tmp_path / "given.json")
    _check_nothing_compiled(tmp_path)


def _check_refusals(told: dict[str, Any], given: Path) -> None:
    sizes: dict[str, object] = {"path": given, "batch": 16, "micro": 3, "steps": 1, "ranks": 2, "product": 6}
    check(told["batch"], "HT-deepspeed-batch-size", **sizes)
    sizes = {"batch": 17, "micro": 2, "steps": 4, "ranks": 2, "product": 16}
    check(told["indivisible"], "HT-deepspeed-batch-size", **sizes)
    check(told["small"], "HT-deepspeed-batch-size", batch=1, ranks=2)
    check(told["section key"], "HT-deepspeed-unknown-key", section="zero_optimization", key="stagee")
    check(told["section value"], "HT-deepspeed-bad-value", section="zero_optimization", key="stage", value=7)
    check(told["key"], "HT-deepspeed-unknown-key", key="zero_optimisation")
    assert told["key"]["hint"] == "zero_optimization?"
    check(told["float64"], "HT-deepspeed-float64", parameter="0.weight")
    check(told["op"], "HT-deepspeed-not-built", name="cpu_adagrad")


@pytest.mark.thorough
def test_a_killed_rank_ends_the_run_and_leaves_no_lock(tmp_path: Path, environment: dict[str, str]) -> None:
    done = _run(environment, tmp_path, "killed")
    assert done.returncode == 4
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert (failure["code"], failure["rank"]) == ("HT-rank-killed", 1)
    _check_nothing_compiled(tmp_path)
    again = _run(environment, tmp_path / "again", "zero1")
    assert again.returncode == 0, again.stdout + again.stderr


def test_without_deepspeed_the_run_is_refused_before_it_starts(tmp_path: Path, environment: dict[str, str]) -> None:
    if find_spec("deepspeed"):
        pytest.skip("DeepSpeed is in this environment itself")
    done = _run({**environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}, tmp_path, "zero1")
    assert done.returncode == 2
    assert "HT-package-not-installed" in codes(done.stderr) and "DS_BUILD_OPS=0 " in done.stderr
