from __future__ import annotations

import math
from typing import Any

from hpctrain.common.files.printable import json_text
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.verify.differences import Verdict, lines_of
from hpctrain.report.page import render
from support.golden import check_text

FIRST = {
    "step": 1,
    "kind": "gradient",
    "name": "0.weight",
    "shape": [16, 8],
    "rank": 0,
    "one_process": -0.043473471,
    "ranks": -0.086946942,
    "difference": 1.0,
    "noise": 1.3e-7,
    "factor": 2.0,
}


def record(**changes: Any) -> dict[str, Any]:
    return {
        "equal": False,
        "ranks": 2,
        "steps": 3,
        "largest_difference": 1.3,
        "noise": 1.4e-7,
        "first": FIRST,
        "cause": "a <sum>",
        "notes": ["the work ended after 3 steps"],
        **changes,
    }


def test_the_words_of_verdicts() -> None:
    own = "the script divides its data by itself, so that one process has other batches"
    scalar = {**FIRST, "shape": [], "ranks": math.inf, "factor": None}
    verdicts = [
        record(),
        record(first=scalar, notes=[]),
        record(equal=True, first=None, cause="", largest_difference=9.9e-8),
        record(equal=True, first=None, cause="", notes=[own]),
        # Ranks that fail before their first step.
        record(first=None, steps=0, cause="rank 1 failed", notes=[]),
    ]
    check_text("verdicts", "\n".join(line for each in verdicts for line in lines_of(Verdict.model_validate(each))))


def test_the_page_of_a_verified_run(finished: RunDirectory) -> None:
    assert "Verified against one process" not in render(finished)
    finished.verdict.write_text(json_text(record()))
    page = render(finished)
    assert "different: 2 ranks do not compute what one process computes" in page and "a &lt;sum&gt;" in page
