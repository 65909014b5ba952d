"""Predictions of the runs in written_runs, written by hand as ``hpctrain predict --json`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def figure(low: float, value: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def row(**changes: Any) -> dict[str, Any]:
    """Of two ranks of a node, 64 samples a step of 0.5 s: what the run of :func:`written_runs.run_events` took."""
    values: dict[str, Any] = {
        "nodes": 1,
        "gpus": 2,
        "batch_per_gpu": 32.0,
        "step_s": figure(0.4, 0.5, 0.6),
        "samples_per_s": figure(100, 128, 150),
        "communication_share": figure(0.1, 0.2, 0.3),
        "epochs": figure(20, 20, 20),
        "minutes": figure(0.9, 1.2, 1.5),
        "memory_bytes": figure(1e9, 2e9, 3e9),
        "kwh": None,
    }
    return {**values, **changes}


def record(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = rows or (row(),)
    alone = found[0] if len(found) == 1 else {}
    return {**alone, "recipe": "digits", "gpu": "h200", "engine": "nccl", "rows": [*found], **changes}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
