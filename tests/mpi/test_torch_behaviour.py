"""What the PyTorch adapter promises beside the numbers, on two real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "torch_behaviour.py"
BACKENDS = ("mpi", "horovod", "gloo")
EQUAL = {
    "dropped_models_are_freed": 0,
    "used_on_one_rank_only": [[[1.0, 1.0]], [[0.5, 0.5]], None],
    "distributing_twice_reduces_once": 0.5,
}
# The codes and values of errors, one after the other; None where nothing is refused.
REFUSED: dict[str, list[tuple[str, dict[str, Any]] | None]] = {
    "guard_names_the_parameter": [("HT-parameters-differ", {"name": "1.bias", "sides": [[0], [1]], "odd": []})],
    "a_failed_backward_is_not_forgotten": [("HT-backward-ended-early", {})],
    "different_models_are_refused": [("HT-ranks-different-models", {"rank": 1})],
    "layer_shared_between_reentrant_checkpoints_is_refused": [("HT-gradient-twice", {})],
    "settings_are_checked": [
        ("HT-choice-unknown", {"compression": "fp8"}),
        ("HT-argument-not-valid", {"bucket_mb": 0}),
        ("HT-argument-not-valid", {"kind": "str"}),
        *2 * [("HT-argument-not-valid", {})],
    ],
    "an_optimizer_made_anew": [None, ("HT-parameters-differ", {"name": "bias"})],
    "an_end_before_the_next_check": [
        ("HT-parameters-differ", {"step": 3, "name": "weight"}),
        ("HT-model-of-other-communicator", {}),
        ("HT-parameters-differ", {"step": 3, "name": "weight"}),
    ],
    "a_gradient_in_a_graph": [("HT-gradient-in-graph", {})],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, mpirun):
    # one start of the ranks serves every test of this file
    folder = tmp_path_factory.mktemp("behaviour")
    mpirun(PROGRAM, 2, ",".join(BACKENDS), str(folder / "out"))
    return folder


@pytest.fixture(params=BACKENDS)
def ranks(request, folder):
    return [json.loads((folder / f"out-{request.param}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
def test_numbers_are_those_of_one_process(ranks):
    for rank in ranks:
        assert rank["one_backward_pass_through_several_models"] < 1e-6
        assert {name: rank[name] for name in EQUAL} == EQUAL
    # 1 - 2 steps x 0.5 x (1 + rank): an optimizer of something else is left alone.
    assert [rank["an_optimizer_of_something_else"] for rank in ranks] == [0.0, -1.0]


def test_what_is_wrong_is_refused_on_every_rank(ranks):
    for rank in ranks:
        for name, wanted in REFUSED.items():
            for record, expected in zip(rank[name] if len(wanted) > 1 else [rank[name]], wanted, strict=True):
                if expected is None:
                    assert record is None, name
                else:
                    check(record, expected[0], **expected[1])


def test_weights_buffers_and_optimizer_state_come_from_rank_0(ranks):
    first, second = (rank["start_from_rank_0"] for rank in ranks)
    assert first == second
    assert first["batches"] == 3 and first["step"] == 3 and first["rate"] == 0.1
    assert any(first["exp_avg"])


def test_models_whose_backward_passes_come_in_another_order_are_refused_on_every_rank(ranks):
    for rank in ranks:
        refusals = [*rank["models_in_another_order_on_another_rank"], rank["a_model_that_one_rank_alone_trains"]]
        assert len(refusals) == 5
        for refusal in refusals:
            check(refusal, "HT-ranks-reduce-differently")
            assert {"Red", "Blue"} == set(re.findall(r"\((\w+)\)", refusal["values"]["models"]))


def test_what_reduces_gradients_by_itself_is_refused(ranks):
    for rank in ranks:
        assert len(rank["wrapped"]) >= 2
        for refusal in rank["wrapped"].values():
            check(refusal, "HT-gradients-reduced-twice")
