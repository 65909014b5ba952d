"""What the PyTorch adapter promises beside the numbers, on two real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "torch_behaviour.py"


BACKENDS = ("mpi", "horovod", "gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, mpirun):
    # one start of the ranks serves every test of this file
    folder = tmp_path_factory.mktemp("behaviour")
    result = mpirun(PROGRAM, 2, ",".join(BACKENDS), str(folder / "out"))
    (folder / "output").write_text(result.stdout)
    return folder


@pytest.fixture(params=BACKENDS)
def ranks(request, folder):
    return [json.loads((folder / f"out-{request.param}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
def test_first_bucket_is_in_flight_before_the_last_gradient_exists(ranks):
    for rank in ranks:
        trace = rank["overlap"]
        assert trace["first_launch"] < trace["last_gradient"]
        assert trace["gradients"] == 24
        assert trace["launched"] == sorted(trace["launched"]) and len(trace["launched"]) > 4
        assert trace["in_order_of_time"]
        assert trace["waited"] >= 0


def test_weights_buffers_and_optimizer_state_come_from_rank_0(ranks):
    first, second = (rank["start_from_rank_0"] for rank in ranks)
    assert first == second
    assert first["batches"] == 3 and first["step"] == 3 and first["rate"] == 0.1
    assert any(first["exp_avg"])


def test_guard_names_parameter_rank_and_host(ranks):
    for rank in ranks:
        values = {"name": "1.bias", "sides": [[0], [1]], "odd": [], "count": 1, "element": [1]}
        check(rank["guard_names_the_parameter"], "HT-parameters-differ", **values)


def test_a_parameter_unfrozen_after_distribute_gets_the_mean(ranks):
    for rank in ranks:
        assert rank["unfrozen_later"] == [[1.5, 1.5]] * 2


def test_an_update_after_a_backward_that_failed_is_refused(ranks):
    for rank in ranks:
        check(rank["a_failed_backward_is_not_forgotten"], "HT-backward-ended-early")


def test_dropped_models_are_freed(ranks):
    assert [rank["dropped_models_are_freed"] for rank in ranks] == [0, 0]


def test_different_models_are_refused_on_every_rank(ranks):
    for rank in ranks:
        check(rank["different_models_are_refused"], "HT-ranks-different-models", rank=1)


def test_a_second_gradient_after_the_bucket_left_is_refused(ranks):
    for rank in ranks:
        check(rank["layer_shared_between_reentrant_checkpoints_is_refused"], "HT-gradient-twice")


def test_reentrant_checkpoints_give_the_same_gradients(ranks):
    assert all(rank["reentrant_checkpoint_works"] < 1e-6 for rank in ranks)


def test_a_parameter_that_one_rank_used_gets_its_mean_everywhere(ranks):
    for rank in ranks:
        assert rank["used_on_one_rank_only"] == [[[1.0, 1.0]], [[0.5, 0.5]], None]


def test_distributing_a_model_twice_reduces_once(ranks):
    assert [rank["distributing_twice_reduces_once"] for rank in ranks] == [0.5, 0.5]


def test_wrong_settings_name_the_valid_ones(ranks):
    compression, bucket, model, missing, optimizers = ranks[0]["settings_are_checked"]
    check(compression, "HT-choice-unknown", compression="fp8")
    check(bucket, "HT-argument-not-valid", bucket_mb=0)
    check(missing, "HT-argument-not-valid")
    check(optimizers, "HT-argument-not-valid")
    check(model, "HT-argument-not-valid", kind="str")


def test_models_whose_backward_passes_come_in_another_order_are_refused_on_every_rank(ranks):
    for rank in ranks:
        refusals = [*rank["models_in_another_order_on_another_rank"], rank["a_model_that_one_rank_alone_trains"]]
        assert len(refusals) == 5
        for refusal in refusals:
            check(refusal, "HT-ranks-reduce-differently")
            assert {"Red", "Blue"} == set(re.findall(r"\((\w+)\)", refusal["values"]["models"]))


def test_one_backward_pass_through_several_models_equals_one_process(ranks):
    assert all(rank["one_backward_pass_through_several_models"] < 1e-6 for rank in ranks)


def test_what_is_added_or_replaced_after_distribute_trains_as_in_one_process(ranks):
    for rank in ranks:
        found = rank["replaced_parameters"]
        assert max(found["off"].values()) < 1e-6
        check(found["dtype"], "HT-parameter-changed-form", dtype="torch.float64")
        # converted and back: the gradients still lie in the bucket
        assert found["back"] == [None, ranks[0]["replaced_parameters"]["back"][1]]


def test_a_changed_model_that_is_distributed_again_equals_one_process(ranks):
    assert all(rank["replaced_and_distributed_again"] < 1e-12 for rank in ranks)


def test_an_optimizer_made_anew_is_looked_at(ranks):
    for rank in ranks:
        first, second = rank["an_optimizer_made_anew"]
        assert first is None
        check(second, "HT-parameters-differ", name="bias")


def test_an_optimizer_of_something_else_is_left_alone(ranks):
    # 1 - 2 steps x 0.5 x (1 + rank)
    assert [rank["an_optimizer_of_something_else"] for rank in ranks] == [0.0, -1.0]


def test_what_reduces_gradients_by_itself_is_refused(ranks):
    for rank in ranks:
        assert len(rank["wrapped"]) >= 2
        for refusal in rank["wrapped"].values():
            check(refusal, "HT-gradients-reduced-twice")


def test_errors_from_inside_torch_say_what_to_do(ranks):
    for rank in ranks:
        refused = rank["refused_parts"]
        check(refused["lazy"], "HT-model-not-built")
        check(refused["graph"], "HT-gradient-in-graph")
        assert rank["a_gradient_penalty"] < 1e-5


def test_copies_of_a_model_are_plain_models(ranks):
    assert all(rank["the_models_own_copies"] == [0, 0, 0] for rank in ranks)


def test_what_differs_after_the_last_check_is_found_at_the_end(ranks):
    for rank in ranks:
        present, again, gone = rank["an_end_before_the_next_check"]
        check(present, "HT-parameters-differ", step=3)
        check(again, "HT-model-of-other-communicator")
        check(gone, "HT-parameters-differ", step=3, name="weight")


def test_a_sparse_embedding_that_is_used_densely_too_is_refused(ranks):
    for rank in ranks:
        check(rank["a_sparse_embedding_that_is_used_densely_too"], "HT-gradient-not-sparse", parameter="weight")


def test_synchronised_batch_norm_equals_one_process_on_the_whole_batch(ranks):
    for rank in ranks:
        assert max(rank["synchronised_batch_norm"]) < 1e-5


def test_complex_parameters_get_the_mean_of_all_ranks(ranks):
    for rank in ranks:
        assert max(rank["complex_parameters"]) < 1e-5
