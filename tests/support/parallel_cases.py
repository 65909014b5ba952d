"""Starts ranks over NCCL, or over Gloo without a GPU, and compares what meshes computed with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.gpu_sections import GPUS
from support.imported_programs import imported
from support.pages import ROOT

BACKEND = "nccl" if GPUS else "gloo"
# A GPU adds up in another order.
FLOAT32 = 1e-4 if GPUS else 1e-5
_TOLERANCE = {"float64": 1e-10, "float32": FLOAT32, "bfloat16": 0.05}
PROGRAM = ROOT / "tests" / "mpi" / "programs" / "parallel.py"

_references: dict[Any, dict[str, Any]] = {}


def start(ranks: int, backend: str = BACKEND) -> tuple[str, ...]:
    """The options of ``hpctrain run`` for so many ranks, which share GPUs where there are fewer."""
    shared = ("--share-gpus",) if 0 < GPUS < ranks and backend != "gloo" else ()
    return ("-np", str(ranks), "--oversubscribe", "--backend", backend, *shared)


def differences(out: Path, ranks: int, cases: list[str]) -> list[dict[str, Any]]:
    """A row for each case of parallel.py that ended: how far its parameters are from those of one process."""
    program = imported(PROGRAM)
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
