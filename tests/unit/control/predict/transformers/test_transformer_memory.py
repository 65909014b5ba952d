"""The memory of ranks that train transformers, against PyTorch's schedules, its tracker of tensors, and formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.transformers.layout import STATES, Layout
from hpctrain.control.predict.transformers.model_sizes import named
from hpctrain.control.predict.transformers.rank_memory import (
    in_flight,
    layer_activations,
    memory,
    rank_memories,
)
from support import needs
from support.meshes import mesh

GPT = Transformer(layers=4, width=256, heads=4, kv_heads=4, mlp=1024, vocabulary=4000, context=128)
LLAMA = replace(GPT, kv_heads=2, mlp=704, kind="swiglu", norm="rmsnorm", positions="rotary", bias="none", tied=False)
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 3}


def order_of_passes(schedule: str, pp: int, batches: int, turns: int) -> dict[int, list[Any]]:
    """The passes of each rank, as PyTorch's schedule puts them in order."""
    from hpctrain.worker.adapters.torch.parallel.schedules import SCHEDULES

    kind = SCHEDULES[schedule][0]
    made: Any = object.__new__(kind)
    made._n_microbatches, made.pp_group_size, made.n_local_stages = batches, pp, turns
    made.num_stages = made._num_stages = pp * turns
    made.number_of_rounds = max(1, batches // pp)
    made.microbatches_per_round = batches // made.number_of_rounds
    made._stages = [None] * turns
    if turns == 1:
        return made._get_pipeline_order()
    return {rank: made._calculate_single_rank_operations(rank) for rank in range(pp)}


@needs.pytorch
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", STAGES)
def test_micro_batches_in_flight_are_those_of_pytorchs_schedules(schedule, pp):
    turns = STAGES[schedule]
    for batches in (pp, pp + 1, 2 * pp - 1, 2 * pp, 4 * pp):
        layout = Layout(mesh=mesh(pp=pp), schedule=schedule, virtual_stages=turns, micro_batches=batches)
        for rank, passes in order_of_passes(schedule, pp, batches, turns).items():
            held = most = 0
            for each in passes:
                kind = each.computation_type.name if each else ""
                held += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
                most = max(most, held)
            assert in_flight(layout, rank) == most, (batches, rank)


@pytest.mark.parametrize("ranks", [1, 4, 64])
@pytest.mark.parametrize(
    ("state", "whole", "divided"), [("megatron", 6, 12), ("megatron_fp16", 4, 12), ("float32", 8, 8)]
)
def test_state_is_that_of_megatrons_distributed_optimizer(state, whole, divided, ranks):
    found = memory(GPT, Layout(mesh=mesh(dp_shard=ranks), zero=1, state=STATES[state]))
    total = found.tensors["parameters"] + found.tensors["gradients"] + found.tensors["optimizer"]
    assert total == pytest.approx(GPT.parameters.total * (whole + divided / ranks))


@pytest.mark.parametrize("ranks", [1, 4])
def test_gradients_in_float32_are_there_in_the_update_alone(ranks):
    layout = Layout(mesh=mesh(dp_shard=ranks), zero=1, state=STATES["megatron_fp16"], recomputation="full")
    found = memory(GPT, layout, sequence=8)
    # Megatron-LM's 4 + 16 / d; its Adam is one kernel, so that kernels one by one change nothing.
    assert found.moment == "update"
    assert found.allocated == pytest.approx(GPT.parameters.total * (4 + 16 / ranks))
    assert memory(GPT, replace(layout, kernels="eager"), sequence=8).allocated == found.allocated
    longer = memory(GPT, replace(layout, micro_batch=64, recomputation="none"))
    assert longer.moment != "update"
    assert longer.tensors["optimizer"] == pytest.approx(GPT.parameters.total * 12 / ranks)


@pytest.mark.parametrize(("zero", "share"), [(1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_zero_divides_more_with_each_stage(zero, share):
    layout = Layout(mesh=mesh(dp_shard=4, cp=2), zero=zero)
    found, whole = memory(LLAMA, layout), LLAMA.parameters.total
    expected = [each * whole / parts for each, parts in zip((4, 4, 8), share, strict=True)]
    assert [found.tensors["parameters"], found.tensors["gradients"], found.tensors["optimizer"]] == expected


def test_ranks_of_a_pipeline_have_all_parameters_together():
    layout = Layout(mesh=mesh(pp=4), micro_batches=8)
    found = sum(each.tensors["parameters"] for each in rank_memories(LLAMA, layout))
    assert found == 4 * LLAMA.parameters.total
    # A tied head is a copy of its own on the last stage.
    apart = sum(each.tensors["parameters"] for each in rank_memories(GPT, layout))
    assert apart == 4 * (GPT.parameters.total + GPT.parameters.embedding)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_divides_activations_as_in_korthikanti(sequence_parallel):
    layout = Layout(
        mesh=mesh(tp=4),
        micro_batch=2,
        sequence_parallel=sequence_parallel,
        attention="materialised",
        dropout=True,
    )
    s, h, a, t = GPT.context, GPT.width, GPT.heads, 4
    # Table 2: without sequence parallelism, and with it.
    expected = (34 + 5 * a * s / h) / t if sequence_parallel else 10 + 24 / t + 5 * a * s / (h * t)
    assert layer_activations(GPT, layout, sequence=s) == 2 * s * h * expected
    selective = layer_activations(GPT, replace(layout, recomputation="selective"), sequence=s)
    assert selective == 2 * s * h * (expected - 5 * a * s / (h * t))


def test_full_recomputation_keeps_inputs_alone():
    small = replace(GPT, vocabulary=101)
    plain, found = (memory(small, Layout(micro_batch=64, recomputation=each)) for each in ("none", "full"))
    tokens = 64 * GPT.context
    # Of each layer, in 2 bytes; besides the inputs of the last norm and of the head, and the tokens' numbers.
    assert found.tensors["activations"] == tokens * (2 * GPT.width * (GPT.layers + 2) + 8)
    assert found.allocated < plain.allocated / 2


def test_context_parallelism_divides_tokens():
    whole = memory(GPT, Layout(micro_batch=8, zero=0)).tensors["activations"]
    assert memory(GPT, Layout(mesh=mesh(cp=4), micro_batch=8, zero=0)).tensors["activations"] == whole / 4


def test_recomputation_keeps_few_activations():
    large, sharded = named("llama3-8b"), Layout(mesh=mesh(dp_shard=64), zero=3, micro_batch=8, kernels="eager")
    again = replace(sharded, recomputation="full")
    assert memory(large, again).tensors["activations"] < memory(large, sharded).tensors["activations"] / 10


def test_kinds_of_memory_are_apart():
    found = memory(GPT, Layout(mesh=mesh(dp_shard=8)))
    assert found.allocated < found.used
    assert found.allocated == sum(found.tensors.values())
    assert found.communication > 0
    assert memory(GPT, Layout()).communication == 0


def tracked(sizes: Transformer, layout: Layout) -> int:
    """The peak of the second of two steps of one process, as MemTracker sees it on tensors without memory."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from support.transformer_modules import Network

    # Autocast of a CPU computes softmax in 16 bits and a GPU's does not; nothing else here is different.
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=layout.autocast)
    torch.set_default_dtype(torch.bfloat16 if layout.sum_bytes == 2 else torch.float32)
    try:
        with FakeTensorMode():
            model = Network(sizes, materialised=layout.attention == "materialised")
            tokens = torch.zeros(layout.micro_batch, sizes.context, dtype=torch.long)
            for layer in model.layers if layout.recomputation == "full" else ():
                own = layer.forward
                layer.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, tokens)
            with tracker:
                for _ in range(2):
                    optimizer.zero_grad()
                    for _ in range(layout.micro_batches):
                        tracker.reset_mod_stats()
                        with autocast:
                            logits = model(tokens)
                        loss = F.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())
                        del logits
                        loss.backward()
                    optimizer.step()
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        torch.set_default_dtype(torch.float32)


@needs.pytorch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "settings", "moment"),
    [
        (GPT, {"micro_batch": 1}, "update"),
        (GPT, {"micro_batch": 32}, "loss"),
        (replace(GPT, vocabulary=101), {"micro_batch": 32, "micro_batches": 2}, "backward"),
        (GPT, {"micro_batch": 16, "precision": "bf16", "state": STATES["bf16"]}, "loss"),
        (replace(GPT, vocabulary=101), {"micro_batch": 64, "recomputation": "full"}, "backward"),
        (replace(GPT, vocabulary=101), {"micro_batch": 64, "precision": "bf16", "autocast": True}, "backward"),
        (
            replace(GPT, vocabulary=101),
            {"micro_batch": 64, "precision": "bf16", "autocast": True, "recomputation": "full"},
            "backward",
        ),
        (replace(LLAMA, vocabulary=101), {"micro_batch": 64, "precision": "bf16", "autocast": True}, "backward"),
        (LLAMA, {"micro_batch": 64, "attention": "materialised"}, "loss"),
        (replace(LLAMA, vocabulary=101, kv_heads=4), {"micro_batch": 64, "recomputation": "full"}, "backward"),
    ],
)
def test_one_process_takes_what_is_tracked(sizes, settings, moment):
    settings = {"precision": "float32", "zero": 0, "kernels": "eager", "gradient_buffer": False, **settings}
    layout = Layout(**settings)
    found = memory(sizes, layout)
    assert found.moment == moment
    assert found.allocated / tracked(sizes, layout) == pytest.approx(1, abs=0.05), found


@pytest.mark.parametrize(("pp", "batches", "held"), [(1, 1, 0), (1, 2, 1), (1, 8, 2), (2, 8, 2)])
def test_deepspeed_s_pipeline_engine_keeps_inputs_outputs_and_logits(pp, batches, held):
    network = replace(GPT, vocabulary=40000)
    plain = Layout(mesh=mesh(pp=pp), micro_batch=64, micro_batches=batches, recomputation="full", zero=0)
    found, usual = (rank_memories(network, replace(plain, deepspeed_pipeline=deepspeed)) for deepspeed in (True, False))
    tokens = 64 * GPT.context
    # 16 bits, float32, and float32 of earlier micro-batches, with Megatron-LM's loss in place of the logits.
    assert found[-1].moment == "loss"
    assert found[-1].tensors["logits"] == tokens * network.vocabulary * (2 + 4 + 4 * held)
    # The first rank's output, and the last one's copied input, of each micro-batch in flight.
    copies = [0] if pp == 1 else [2, 1]
    for here, there, count in zip(found, usual, copies, strict=True):
        assert here.tensors["activations"] - there.tensors["activations"] == count * tokens * 2 * GPT.width
