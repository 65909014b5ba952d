"""Ranks that make steps by themselves, against a simulation of all of them in one process of plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.run.events import read_events
from support.refusals import check
from support.simulated_ranks import PROGRAM, program, simulated

pytest.importorskip("torch")

FRAMEWORKS = [("torch", 2), ("torch", 3), ("keras", 2)]
OF_MAKE_TEST = ("torch", 3)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            each, id=f"{each[0]} on {each[1]} ranks", marks=() if each == OF_MAKE_TEST else pytest.mark.thorough
        )
        for each in FRAMEWORKS
    ],
)
def ran(request, mpirun, tmp_path_factory):
    """The framework, each rank's results, and where rank 0 left its events."""
    framework, ranks = request.param
    if framework == "keras":
        pytest.importorskip("keras")
    output = tmp_path_factory.mktemp(framework) / "out"
    mpirun(PROGRAM, ranks, framework, str(output), HPCTRAIN_TIMEOUT="60")
    return framework, [dict(np.load(f"{output}-{rank}.npz")) for rank in range(ranks)], output


@pytest.mark.long
def test_equals_the_simulation(ran):
    framework, results, output = ran
    for case in program.CASES:
        for result in results:
            np.testing.assert_array_equal(result[case], results[0][case], err_msg=f"{case}: ranks differ")
        expected, losses = simulated(case, results[0][f"{case} begun"], len(results), framework)
        np.testing.assert_allclose(results[0][case], expected, rtol=0, atol=2e-6, err_msg=case)
        steps = [each for each in read_events(Path(f"{output}-{case}.jsonl")) if each.event == "step"]
        np.testing.assert_allclose([each.loss for each in steps], losses, rtol=0, atol=2e-5, err_msg=case)


def test_every_step_of_plain_sgd_is_synchronous_training(ran):
    _, results, _ = ran
    begun = results[0]["every step begun"]
    whole, _ = simulated("every step", begun, 1)
    np.testing.assert_allclose(results[0]["every step"], whole, rtol=0, atol=1e-6)
    assert np.abs(results[0]["every step"] - begun).max() > 1e-2
    # And with momentum and rounds of several steps it is not.
    other, _ = simulated("local", results[0]["local begun"], 1)
    assert np.abs(results[0]["local"] - other).max() > 1e-4


def test_stops_where_the_ranks_meet_and_resumes_with_the_same_bits(ran):
    _, results, _ = ran
    for result in results:
        assert result["stopped after"] == 2
        np.testing.assert_array_equal(result["resumed"], results[0]["diloco"])


def test_a_step_that_is_not_finite_ends_the_run_where_the_ranks_meet(ran):
    _, results, _ = ran
    for result in results:
        check(json.loads(str(result["non-finite"])), "HT-step-not-finite", iteration=2, epoch=1, ranks=[0])


def test_ranks_that_differ_after_a_meeting_are_found(ran):
    _, results, _ = ran
    for result in results:
        check(json.loads(str(result["differ"])), "HT-parameters-differ")
