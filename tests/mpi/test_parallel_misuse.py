"""A mistake about a mesh ends with what is wrong, the valid choices and what to do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "parallel_misuse.py"

REFUSED = {
    "another_mesh": ("HT-mesh-not-valid", {"names": ["dp"]}),
    "stages_in_distribute": ("HT-mesh-not-supported", {"pp": 2}),
    "context_parallel": ("HT-mesh-not-supported", {"cp": 2}),
    "tensor_parallel_without_a_plan": ("HT-parallel-plan-not-valid", {"tp": 2}),
    "unknown_schedule": ("HT-choice-unknown", {"schedule": "1b1f"}),
    "optimizer_with_a_state": (
        "HT-optimizer-not-supported",
        {"name": "row_var", "shape": [16, 1], "parameter_shape": [16, 16]},
    ),
    "optimizer_of_another_model": ("HT-optimizer-other-parameters", {"optimizer": "AdamW", "shape": [16, 16]}),
    "tie_divided_in_two_ways_over_stages": ("HT-parallel-plan-not-valid", {}),
    "compressed_shards": ("HT-compression-of-divided-model", {}),
    "a_layer_added_to_a_divided_model": ("HT-model-divided", {"name": "head.1.weight", "model": "GPT"}),
    "a_parameter_replaced_in_a_divided_model": ("HT-model-divided", {"name": "Linear.weight"}),
    "divided_already": ("HT-gradients-reduced-twice", {}),
    "divided_by_pytorch": ("HT-gradients-reduced-twice", {}),
    "a_step_after_an_error": ("HT-backward-ended-early", {}),
    # Each rank's gradient of it is that of its part of the sequence.
    "layer_without_a_plan_in_a_divided_sequence": (
        "HT-parameters-differ",
        {"step": 1, "name": "blocks.0.attention_norm.weight"},
    ),
    "parts_that_ranks_gather_alone": ("HT-plan-parts-differ", {}),
    "a_clip_of_one_stage": ("HT-pipeline-gradients-changed", {}),
}
# PyTorch's own error, and what to write instead.
EXPLAINED = {"a_flattened_gradient": "t.full_tensor()"}


def _said(result):
    lines = [line.partition(": ") for line in result.stdout.splitlines()]
    return {name: json.loads(text) for name, _, text in lines if name in REFUSED or name in EXPLAINED}


@pytest.mark.long
def test_each_mistake_is_named(mpirun):
    said = _said(mpirun(PROGRAM, 4, "gloo"))
    assert said.keys() == REFUSED.keys() | EXPLAINED.keys()
    for name, (code, values) in REFUSED.items():
        check(said[name], code, **values)
    for name, remedy in EXPLAINED.items():
        assert remedy in said[name], name


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
@pytest.mark.long
def test_horovod_has_no_groups_for_a_mesh(mpirun):
    said = _said(mpirun(PROGRAM, 2, "horovod"))
    check(said["compressed_shards"], "HT-backend-unfit", backend="horovod")
