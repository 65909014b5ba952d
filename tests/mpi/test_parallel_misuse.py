"""A mistake about a mesh ends with what is wrong, the valid choices and what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "parallel_misuse.py"

SAID = {
    "another_mesh": "this mesh has the dimensions ('dp',), not dp_replicate, dp_shard, pp, cp, tp",
    "ranks_that_do_not_fit": "the mesh tp 3 = 3 does not divide 4 ranks",
    "unknown_axis": "unknown axis 'tensor'",
    "stages_in_distribute": "the mesh has pp 2, but ht.distribute does not cut a model into stages",
    "no_stages_in_pipeline": "the mesh has pp 1: there is one stage",
    "context_parallel": "the mesh has cp 2: PyTorch's context_parallel computes attention only with",
    "tensor_parallel_without_a_plan": "the mesh has tp 2, but the plan divides no layer",
    "heads": "tp 2 does not divide the 5 heads of 'blocks.0.attention' |   choose tp among 1, 5",
    "no_such_module": "shard of the plan names Layer, which GPT does not have |   did you mean",
    "fewer_layers_than_stages": "2 pipeline stages need at least as many layers, but GPT.blocks has 1",
    "unknown_schedule": "unknown pipeline schedule '1b1f' |   valid: 1f1b",
    "too_few_micro_batches": "1f1b refuses 1 micro-batches",
    "optimizer_with_a_state": "keeps 'row_var' of shape (16, 1) for a parameter of shape (16, 16)",
    "optimizer_whose_rule_needs_whole_parameters": "Adafactor fails with parameters that are divided over ranks: ",
    "optimizer_whose_rule_spans_stages": "Normalised updates a parameter depending on the others, and other stages",
    "optimizer_that_hides_its_parameters": "a copy of Hiding with other parameters does not update those",
    "optimizer_of_another_model": "AdamW updates a parameter of shape (16, 16) that the model does not have",
    "tie_across_units": "'tokens.weight' and 'head.weight' are one parameter, but the plan's shard names",
    "tie_divided_in_two_ways": "are one parameter, which the plan divides in two ways",
    "tie_divided_in_two_ways_over_stages": "are one parameter, which the plan divides in two ways",
    "zero_1_of_a_divided_model": "zero=1 divides the state of an optimizer of the whole model",
    "compressed_shards": "compression is for ranks that replicate the whole model",
    "a_copy_of_a_divided_model": "GPT is divided over the ranks and cannot be copied",
    "a_penalty_on_divided_weights": "in a penalty, take p.full_tensor() if hasattr(p, 'full_tensor') else p for each p",
    "divided_already": "the model is divided over the ranks already",
    "other_optimizers_of_a_divided_model": "the model is divided over the ranks already",
    "divided_by_pytorch": "gradients would be reduced twice",
    "an_optimizer_without_fused_kernels": "SGD fails with parameters that are divided over ranks: NotImplementedError",
    "a_flattened_gradient": "cannot be flattened: take t.full_tensor()",
    "a_step_within_no_sync": "optimizer.step() after a backward pass within ht.no_sync()",
    "gradients_of_no_sync_made_zero": "gradients were changed between backward passes within ht.no_sync()",
    "a_step_after_a_refusal": "an error ended a backward pass before its gradients were reduced",
    # Each rank's gradient of it is that of its part of the sequence.
    "layer_without_a_plan_in_a_divided_sequence": "after step 1 the ranks hold different parameters: "
    "'blocks.0.attention_norm.weight",
    "a_clip_of_one_stage": "the gradients were changed after pipeline.step()",
}


def _said(result):
    lines = [line.partition(": ") for line in result.stdout.splitlines()]
    return {name: text for name, _, text in lines if name in SAID}


@pytest.mark.long
def test_each_mistake_is_named(mpirun):
    said = _said(mpirun(PROGRAM, 4, "gloo"))
    for name, text in SAID.items():
        assert text in said[name], name


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
@pytest.mark.long
def test_horovod_has_no_groups_for_a_mesh(mpirun):
    said = _said(mpirun(PROGRAM, 2, "horovod"))
    assert "backend 'horovod'" in said["no_such_module"]
    assert all(other in said["no_such_module"] for other in ("gloo", "nccl", "mpi"))
