"""How the checks of ``make gpu`` start programs and ranks, and compare what meshes computed with one process.

Ranks are connected over NCCL, or over Gloo without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from support.imported_programs import imported
from support.pages import ROOT

# The folder for the report, which `make gpu` sets; the ordinary suite has none.
REPORT = "GPU_REPORT"
GPUS = torch.cuda.device_count()
on_gpus = pytest.mark.skipif(not GPUS, reason="PyTorch sees no GPU")
# What only `make gpu` runs, on a machine without a GPU too.
of_make_gpu = pytest.mark.skipif(not os.environ.get(REPORT), reason="only `make gpu` runs it")
BACKEND = "nccl" if GPUS else "gloo"
CARD = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]} if GPUS else {}
TOY = "" if GPUS else "toy sizes on a CPU: the figures mean nothing"
# A GPU adds up in another order.
FLOAT32 = 1e-4 if GPUS else 1e-5
PARALLEL = ROOT / "tests" / "mpi" / "programs" / "parallel.py"
_SPEED = ROOT / "tests" / "gpu" / "programs" / "recipe_speed.py"
_TOLERANCE = {"float64": 1e-10, "float32": FLOAT32, "bfloat16": 0.05}
# For a program to end once it is asked to, before it is killed.
_GRACE_SECONDS = 5.0

_references: dict[Any, dict[str, Any]] = {}


def launch(
    folder: Path, *arguments: str, seconds: float = 300, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of hpctrain in a folder, for so long at most.

    Args:
        status: the exit status that it has to have; None for any.
    """
    return execute([sys.executable, "-m", "hpctrain", *arguments], folder, seconds=seconds, status=status, **variables)


def execute(
    command: Sequence[str], folder: Path, *, seconds: float = 300, status: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run any program, as :func:`launch` does. What takes too long has 124 for its status, as of timeout(1)."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        late = False
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            # Twice, because the first asks hpctrain to save.
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_GRACE_SECONDS)
                    break
            else:
                output, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    done = subprocess.CompletedProcess(command, 124 if late else process.returncode, output)
    assert status in (None, done.returncode), f"status {done.returncode}, after {seconds:.0f} s at most:\n{output}"
    return done


def start(ranks: int, backend: str = BACKEND) -> tuple[str, ...]:
    """The options of ``hpctrain run`` for so many ranks, which share GPUs where there are fewer."""
    shared = ("--share-gpus",) if 0 < GPUS < ranks and backend != "gloo" else ()
    return ("-np", str(ranks), "--oversubscribe", "--backend", backend, *shared)


def differences(out: Path, ranks: int, cases: list[str]) -> list[dict[str, Any]]:
    """A row for each case of parallel.py that ended: how far its parameters are from those of one process."""
    program = imported(PARALLEL)
    files = [out.with_name(f"{out.name}-{BACKEND}-{rank}.npz") for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return []
    results = [dict(np.load(file)) for file in files]
    rows = []
    for name in cases:
        case = program.CASES[name]
        if any(f"{name}/norm" not in result for result in results):
            continue
        if case.trained not in _references:
            _references[case.trained] = program.reference(name)
        wanted = _references[case.trained]
        apart = max(
            float(np.abs(result[f"{name}/{key}"] - value).max()) for result in results for key, value in wanted.items()
        )
        kind = str(case.precision or case.dtype).removeprefix("torch.")
        rows.append({"case": name, "largest difference": apart, "allowed": _TOLERANCE[kind]})
    return rows


def speed(
    folder: Path,
    note: Any,
    recipe: str,
    *changes: str,
    variants: Sequence[str] = (),
    seconds: float = 240,
    rounds: int = 5,
) -> dict[str, float]:
    """Samples or tokens a second of a recipe's step, of its variants, and of a plain loop; their ratios.

    Args:
        note: the fixture, which writes them into the report.
        changes: what ``--set`` would change of the recipe.
        variants: see ``recipe_speed.py``.
    """
    options: dict[str, Any] = {"recipe": recipe, "set": changes, "variants": variants, "compile": bool(GPUS)}
    options |= {"rounds": rounds, "together": rounds} if GPUS else {"rounds": 2, "together": 1}
    command = [sys.executable, str(_SPEED), "out.json", json.dumps(options)]
    done = execute(command, folder, seconds=seconds, status=None, OMP_NUM_THREADS="1", **CARD)
    out = folder / "out.json"
    assert out.exists(), done.stdout
    measured = json.loads(out.read_text())
    rates: dict[str, float] = measured["rates"]
    to_plain = {name: rate / rates["plain"] for name, rate in rates.items() if name != "plain"}
    note(set=" ".join(changes), a_second=rates, to_plain=to_plain, remark=TOY)
    note(peak_bytes=measured["peak_bytes"], graphs_left_out=measured.get("graphs_left_out"))
    note(waits_for_the_gpu_in_a_step=measured["waits"])
    assert done.returncode == 0 and rates, f"status {done.returncode}, after {seconds:.0f} s at most:\n{done.stdout}"
    assert all(rate > 0 for rate in rates.values())
    # The losses and the norm of the gradients, read together; by an event, where the update comes before, none is seen.
    assert measured["waits"] in ((0, 1) if GPUS else (None,))
    return rates


def shards_of_photographs(folder: Path, count: int) -> Path:
    """So many photographs of 500 x 375 as shards: ImageNet's are as large on average."""
    write_folders(folder / "files", photographs(count))
    write_shards(folder / "shards", folder / "files", 64)
    return folder / "shards"
