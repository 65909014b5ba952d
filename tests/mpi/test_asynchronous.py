"""Training with the parameter server: nothing that a rank adds is lost, and one rank is a plain training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.run.events import read_events
from support.refusals import check
from support.simulated_ranks import simulated

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "asynchronous.py"
EPOCHS, STEPS, PARTS, BATCHES = 2, 40, 10, 4


@pytest.fixture(scope="module", params=["torch", pytest.param("keras", marks=pytest.mark.thorough)])
def ran(request, mpirun, tmp_path_factory):
    """Each of three ranks' results, and where rank 0 left its events."""
    pytest.importorskip(request.param)
    output = tmp_path_factory.mktemp(request.param) / "out"
    mpirun(PROGRAM, 3, request.param, str(output), HPCTRAIN_TIMEOUT="60")
    return request.param, [dict(np.load(f"{output}-{rank}.npz")) for rank in range(3)], output


@pytest.fixture(scope="module")
def alone(mpirun, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "out"
    mpirun(PROGRAM, 1, "torch", str(output), HPCTRAIN_TIMEOUT="60", HPCTRAIN_BACKEND="mpi")
    return dict(np.load(f"{output}-0.npz"))


def of_the_server(ran):
    framework, results, _ = ran
    if framework == "keras":
        pytest.skip("the same server")
    return results


@pytest.mark.long
def test_every_addition_arrives(ran):
    for result in of_the_server(ran):
        for length in (2, 1001):
            np.testing.assert_array_equal(result[f"sum of {length}"], np.full(length, 2 + 2 * (40 + 41 + 42)))
            # A rank's own additions were there before its next.
            assert result[f"least of {length}"].min() >= 0


def test_each_step_is_taken_by_one_rank(ran):
    results = of_the_server(ran)
    taken = np.concatenate([result["taken"] for result in results])
    assert sorted(taken.tolist()) == list(range(len(taken))) and len(taken) > STEPS
    assert all(result["after"] for result in results)


def test_a_rank_waits_for_one_that_is_too_far_behind(ran):
    for result in of_the_server(ran)[1:]:
        np.testing.assert_array_equal(result["seen"], np.ones(4))
        waited = json.loads(str(result["waited"]))
        check(waited, "HT-wait-timed-out", seconds=3.0)
        values = waited["values"]
        assert re.findall("[0-9]+", values["what"]) == ["7", "2"], values


@pytest.mark.parametrize("case", ["downpour", "easgd", "parts"])
def test_every_sample_is_seen_once_and_the_ranks_end_equal(ran, case):
    _, results, output = ran
    assert sum(int(result[f"{case} updates"]) for result in results) == EPOCHS * PARTS
    for result in results:
        np.testing.assert_array_equal(result[case], results[0][case])
        assert result[f"{case} iterations"] == EPOCHS * BATCHES
    steps = [each for each in read_events(Path(f"{output}-{case}.jsonl")) if each.event == "step"]
    assert all(1 <= each.iteration <= EPOCHS * BATCHES for each in steps)
    assert [each.iteration for each in steps] == sorted({each.iteration for each in steps})


@pytest.mark.parametrize("case", ["downpour", "parts"])
def test_the_server_has_what_all_ranks_changed(ran, case):
    _, results, _ = ran
    expected = sum(result[f"{case} moved"] for result in results)
    for result in results:
        np.testing.assert_allclose(result[f"{case} end"], expected, rtol=0, atol=1e-5)
    assert np.abs(results[0][case] - results[0][f"{case} begun"]).max() > 1e-3


def test_others_take_the_steps_of_a_rank_that_is_held_up(ran):
    _, results, _ = ran
    updates = [int(result["held up updates"]) for result in results]
    assert sum(updates) == EPOCHS * PARTS
    assert updates[0] <= EPOCHS


def test_a_step_that_is_not_finite_ends_the_run(ran):
    _, results, _ = ran
    told = [json.loads(str(result["non-finite"])) for result in results]
    for each in told:
        check(each, "HT-step-not-finite", epoch=1)
    assert len({each["message"] for each in told}) == 1


@pytest.mark.long
def test_one_rank_is_a_plain_training(alone):
    expected, _ = simulated("local", alone["downpour begun"], 1)
    np.testing.assert_allclose(alone["downpour"], expected, rtol=0, atol=2e-6)


def test_one_rank_resumes_with_the_same_bits(alone):
    assert alone["stopped after"] == 2
    np.testing.assert_array_equal(alone["resumed"], alone["downpour"])
