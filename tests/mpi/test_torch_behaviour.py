"""What the PyTorch adapter promises beside the numbers, on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        assert "rank 1 built a different model from rank 0" in rank["different_models_are_refused"]


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


def test_models_whose_backward_passes_come_in_another_order_are_refused_on_every_rank(ranks):
    for rank in ranks:
        texts = [*rank["models_in_another_order_on_another_rank"], rank["a_model_that_one_rank_alone_trains"]]
        assert len(texts) == 5
        assert all("(Red) on rank" in text and "(Blue) on rank" in text for text in texts)


def test_one_backward_pass_through_several_models_equals_one_process(ranks):
    assert all(rank["one_backward_pass_through_several_models"] < 1e-6 for rank in ranks)


def test_what_is_added_or_replaced_after_distribute_is_refused_in_that_step(ranks):
    for rank in ranks:
        texts = rank["replaced_parameters"]
        assert all("is not among those that ht.distribute got" in texts[how] for how in ("assign", "head", "added"))
        assert all("whose gradient is not reduced" in texts[how] for how in ("hidden", "closure"))
        assert "has become torch.float64" in texts["dtype"]
        # converted and back: the gradients still lie in the bucket
        assert texts["back"] == ["", ranks[0]["replaced_parameters"]["back"][1]]


def test_a_changed_model_that_is_distributed_again_equals_one_process(ranks):
    assert all(rank["replaced_and_distributed_again"] < 1e-12 for rank in ranks)


def test_an_optimizer_made_anew_is_looked_at(ranks):
    for rank in ranks:
        first, second = rank["an_optimizer_made_anew"]
        assert first == "" and "'bias' differs" in second


def test_an_optimizer_of_something_else_is_left_alone_with_a_word(ranks, folder):
    # 1 - 2 steps x 0.5 x (1 + rank)
    assert [rank["an_optimizer_of_something_else"] for rank in ranks] == [0.0, -1.0]
    assert (folder / "output").read_text().count("SGD updates 1 parameters of no model") == len(BACKENDS)


def test_what_reduces_gradients_by_itself_is_refused(ranks):
    for rank in ranks:
        assert len(rank["wrapped"]) >= 2
        assert all("gradients would be reduced twice" in text for text in rank["wrapped"].values())


def test_errors_from_inside_torch_say_what_to_do(ranks):
    for rank in ranks:
        texts = rank["refused_parts"]
        assert "call the model on one batch" in texts["lazy"]
        assert "'mask' is a sparse tensor" in texts["sparse"]
        assert "torch.autograd.grad" in texts["graph"]
        assert rank["a_gradient_penalty"] < 1e-5


def test_copies_of_a_model_are_plain_models(ranks):
    assert all(rank["the_models_own_copies"] == [0, 0, 0] for rank in ranks)


def test_what_differs_after_the_last_check_is_found_at_the_end(ranks):
    for rank in ranks:
        present, again, gone = rank["an_end_before_the_next_check"]
        assert "after step 3" in present and "element [0, 1] is" in present
        assert "given to ht.distribute before" in again
        assert "after step 3" in gone and "'weight' differs" in gone


def test_ranks_that_are_through_join_the_others_as_one_process_would(ranks):
    for rank in ranks:
        assert max(rank["loops_of_different_length"]) < 1e-6
        assert "which was not given to ht.distribute" in rank["join_of_what_was_not_given"]


def test_gradients_added_to_a_mean_are_refused_in_a_join(ranks):
    for rank in ranks:
        small, *zeroed, large = rank["gradients_added_to_a_mean_in_a_join"]
        assert "adds to the mean" in small and "adds to the mean" in large and zeroed == [""] * 4


def test_a_sparse_embedding_that_is_used_densely_too_is_refused(ranks):
    assert all(
        "'weight'" in (text := rank["a_sparse_embedding_that_is_used_densely_too"]) and "sparse=False" in text
        for rank in ranks
    )


def test_synchronised_batch_norm_equals_one_process_on_the_whole_batch(ranks):
    for rank in ranks:
        assert max(rank["synchronised_batch_norm"]) < 1e-5


def test_complex_parameters_get_the_mean_of_all_ranks(ranks):
    for rank in ranks:
        assert max(rank["complex_parameters"]) < 1e-5
