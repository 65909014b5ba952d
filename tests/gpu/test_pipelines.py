"""Pipelines over NCCL between ranks, which share a GPU where there are fewer: the numbers of one process, or where they
hang. Over Gloo on a machine without a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.gpu_runs import BACKEND, PARALLEL, differences, launch, of_make_gpu, start

pytestmark = of_make_gpu

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
CASES = {
    2: [*(f"pp_{name}" for name in SCHEDULES), *(f"pp_{name}_all" for name in SCHEDULES), "pp_scaler", "pp_recompute"],
    4: [
        "pp4",
        "pp_fsdp_1f1b",
        "pp_fsdp_interleaved_1f1b_all",
        "pp_replicas_1f1b",
        "pp_tp_1f1b",
        "pp_tp_interleaved_1f1b",
    ],
}
# A case that hangs is ended after so long; after the second one the others are given less.
_SECONDS, _LATER_SECONDS = 60, 25


@pytest.mark.parametrize("ranks", CASES)
def test_pipelines_equal_one_process(tmp_path, note, ranks):
    """All cases in one run; behind one that does not end, the others in another run."""
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    left = list(CASES[ranks])
    while left:
        within = _SECONDS if len(failed) < 2 else _LATER_SECONDS
        out = tmp_path / f"out{len(failed)}"
        arguments = ("--run-dir", f"run{len(failed)}", "--", str(out), f"{BACKEND}={','.join(left)}")
        # A step that hangs is to end before that, with the stage and action at fault.
        limits = {"CASE_SECONDS": str(within), "HPCTRAIN_TIMEOUT": str(within - 15)}
        done = launch(tmp_path, "run", str(PARALLEL), *start(ranks), *arguments, seconds=280, status=None, **limits)
        ended = differences(out, ranks, left)
        rows += ended
        left = left[len(ended) :]
        if left:
            # A run prints rank 0 alone as it comes.
            logs = sorted((tmp_path / f"run{len(failed)}" / "logs").glob("rank-*.log"))
            said = "\n".join([*(log.read_text(errors="replace") for log in logs), done.stdout])
            failed.append({"case": left.pop(0), **where(said), "status": done.returncode})
            note(did_not_end=failed, said=said.splitlines()[-100:])
        note(backend=BACKEND, ranks=ranks, cases=rows)
    assert not failed
    assert not [row for row in rows if not row["largest difference"] <= row["allowed"]]


def where(output: str) -> dict[str, Any]:
    """The step that each rank began last, with its place in the pipeline, of what parallel.py printed."""
    places = dict(re.findall(r"rank (\d+) has place (\d+) of the pipeline", output))
    steps = dict(re.findall(r"rank (\d+) begins step (\d+)", output))
    timed_out = "Timeout (" in output or "HT-wait-timed-out" in output
    return {
        "outcome": "hang" if timed_out else "error",
        "error": next((line for line in output.splitlines() if "[HT-" in line), ""),
        "named": [line for line in output.splitlines() if "HT-wait-timed-out" in line][:4],
        "at": "; ".join(f"rank {rank}, place {places.get(rank)}, step {steps.get(rank)}" for rank in sorted(places)),
    }
