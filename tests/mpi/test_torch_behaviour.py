"""What the PyTorch adapter promises beside the numbers, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "torch_behaviour.py"


BACKENDS = ("mpi", "horovod")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, mpirun):
    # one start of the ranks serves every test of this file
    folder = tmp_path_factory.mktemp("behaviour")
    mpirun(PROGRAM, 2, ",".join(BACKENDS), str(folder / "out"))
    return folder


@pytest.fixture(params=BACKENDS)
def ranks(request, folder):
    return [json.loads((folder / f"out-{request.param}-{rank}.json").read_text()) for rank in range(2)]


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
        text = rank["guard_names_the_parameter"]
        assert "'1.bias' differs between rank 0 (" in text and ") and rank 1 (" in text
        assert "1 of 4 parameters" in text and "element [1] is" in text and "likely causes" in text


def test_a_parameter_unfrozen_after_distribute_is_caught(ranks):
    assert all("whose gradient is not reduced" in rank["unfrozen_later_is_caught"] for rank in ranks)


def test_an_optimizer_of_parameters_that_distribute_never_saw_is_refused(ranks):
    for rank in ranks:
        refused, accepted = rank["foreign_parameters_are_refused"]
        assert "(2, 2) whose gradient is not reduced" in refused and accepted == ""


def test_an_update_after_a_backward_that_failed_is_refused(ranks):
    assert all("an error ended a backward pass" in rank["a_failed_backward_is_not_forgotten"] for rank in ranks)


def test_dropped_models_are_freed(ranks):
    assert [rank["dropped_models_are_freed"] for rank in ranks] == [0, 0]


def test_different_models_are_refused_on_every_rank(ranks):
    for rank in ranks:
        assert "rank 1 built another model than rank 0" in rank["different_models_are_refused"]


def test_a_second_gradient_after_the_bucket_left_is_refused(ranks):
    for rank in ranks:
        assert "use_reentrant=False" in rank["layer_shared_between_reentrant_checkpoints_is_refused"]


def test_reentrant_checkpoints_give_the_same_gradients(ranks):
    assert all(rank["reentrant_checkpoint_works"] < 1e-6 for rank in ranks)


def test_a_parameter_that_one_rank_used_gets_its_mean_everywhere(ranks):
    for rank in ranks:
        assert rank["used_on_one_rank_only"] == [[[1.0, 1.0]], [[0.5, 0.5]], None]


def test_distributing_a_model_twice_reduces_once(ranks):
    assert [rank["distributing_twice_reduces_once"] for rank in ranks] == [0.5, 0.5]


def test_wrong_settings_name_the_valid_ones(ranks):
    compression, bucket, model, *optimizers = ranks[0]["settings_are_checked"]
    assert "'fp8'" in compression and "bf16, fp16, none" in compression
    assert "above 0" in bucket
    assert all("not a torch.optim.Optimizer" in text for text in optimizers)
    assert "builtins.str" in model and "torch.nn.Module" in model
