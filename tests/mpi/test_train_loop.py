"""The recipe loop on 1, 2 and 3 ranks gives the numbers of a plain PyTorch loop in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.run.events import read_events
from support.imported_programs import imported
from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "train_loop.py"


@pytest.fixture(scope="module")
def program():
    return imported(PROGRAM)


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
@pytest.mark.long
def test_equals_a_plain_loop(program, mpirun, tmp_path, ranks):
    mpirun(PROGRAM, ranks, str(tmp_path / "out"))
    results = [np.load(tmp_path / f"out-{rank}.npz") for rank in range(ranks)]
    for case in program.CASES:
        parameters, loss, right = program.reference(case)
        for result in results:
            np.testing.assert_array_equal(result[case], results[0][case], err_msg=f"{case}: ranks differ")
        expected = np.concatenate([parameter.ravel() for parameter in parameters])
        np.testing.assert_allclose(results[0][case], expected, rtol=0, atol=1e-5, err_msg=case)
        *_, last = (each for each in read_events(tmp_path / f"out-{case}.jsonl") if each.event == "epoch")
        assert last.test_accuracy == right / 50
        assert last.test_loss == pytest.approx(loss, abs=1e-4)
    for result in results:
        first, skipped, last = (result[f"fp16 {number}"] for number in range(3))
        np.testing.assert_array_equal(skipped, first)
        assert np.isfinite(last).all() and (last != first).any()
        np.testing.assert_array_equal(last, results[0]["fp16 2"])
        assert [result[f"fp16 {number} scale"] for number in range(3)] == [2**16, 2**15, 2**15]
        for early in ("", " early"):
            said = json.loads(str(result[f"stop{early} told"]))
            check(said, "HT-step-not-finite", iteration=program.BAD_STEP, ranks=[ranks - 1])
            assert json.loads(str(result[f"skip{early} told"])) is None
    for rule in ("stop", "skip", "stop early", "skip early"):
        events = [each for each in read_events(tmp_path / f"out-{rule}.jsonl") if each.event == "non_finite"]
        assert (events[0].iteration, events[0].rule, list(events[0].ranks)) == (program.BAD_STEP, rule[:4], [ranks - 1])
        for result in results:
            assert np.isfinite(result[f"{rule} ended"]).all()
            np.testing.assert_array_equal(result[f"{rule} ended"], results[0][f"{rule[:4]} ended"])
