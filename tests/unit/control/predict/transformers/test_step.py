"""The time of a step: closed forms of papers, what must not get faster, and published runs by their magnitude."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.transformers.layout import STATES, Layout
from hpctrain.control.predict.transformers.model_sizes import named
from hpctrain.control.predict.transformers.rates import System, step_constants, step_file
from hpctrain.control.predict.transformers.step import Setup, StepTime
from support.meshes import mesh
from support.refusals import refused

LLAMA = named("llama3-8b")
A100 = System.of("a100-sxm-80", network_bytes_per_s=25e9)
H100 = System.of("h100-sxm", network_bytes_per_s=50e9)
# Everything that is not the bytes of one axis costs nothing, and traffic runs at the rates that are stated.
EXACT = dict.fromkeys(step_constants(), 1.0) | {"hop": 1e-30, "local": 1e-30, "overlap": 1e-30, "stragglers": 1e-30}
RATE = 1e11


def predict_step(
    network: Transformer,
    layout: Layout,
    system: System,
    *,
    software: str = "pytorch",
    sequence: int | None = None,
    constants: Mapping[str, float] | None = None,
) -> StepTime:
    return Setup(network, layout, system, software, sequence).predicted(constants or step_constants())


def wire(joined: int = 1) -> System:
    """GPUs on a wire of 100 GB/s each, with a bus of as much."""
    return replace(H100, bus=((1.0, RATE),), joined=joined, network_bytes_per_s=RATE)


def seconds(term: str, layout: Layout, joined: int = 10_000, **options: object) -> float:
    """One term of LLAMA's step by exact constants."""
    return predict_step(LLAMA, layout, wire(joined), constants=EXACT, **options).terms[term]  # type: ignore[arg-type]


def test_tp_sends_two_all_reduces_of_a_layer_in_either_direction() -> None:
    # Shoeybi et al. 2019, arXiv 1909.08053: each of b s h, 2 (t - 1) / t of it over each link.
    layout = Layout(mesh=mesh(tp=4), micro_batch=3, zero=0)
    expected = 32 * 4 * 2 * 3 / 4 * (3 * 8192 * 4096 * 2) / RATE
    assert seconds("tensor", layout) == pytest.approx(expected)
    # Of those that recompute a layer, two more.
    assert seconds("recomputation", replace(layout, recomputation="full")) > expected / 2
    # Pieces that overlap with the products leave the constant's share.
    sliced = replace(layout, sequence_parallel=True, asynchronous_tp=True)
    half = predict_step(LLAMA, sliced, wire(10_000), constants={**EXACT, "tensor": 0.5}).terms["tensor"]
    assert half == pytest.approx(expected / 2)


def test_pp_sends_a_micro_batch_at_each_boundary() -> None:
    # Narayanan et al. 2021, arXiv 2104.04473, section 4.1: b s h in either direction; with a bubble of (p - 1) more.
    layout = Layout(mesh=mesh(pp=4), micro_batches=8, zero=0)
    one = 2 * 8192 * 4096 * 2 / RATE
    assert seconds("pipeline", layout, joined=1) == pytest.approx((8 + 3) * one)
    # Interleaved stages send as often as each rank has some; with sequence parallelism each rank along tp its part.
    turns = replace(layout, schedule="interleaved_1f1b", virtual_stages=2)
    assert seconds("pipeline", turns, joined=1) == pytest.approx((8 + 3 / 2) * 2 * one)
    divided = replace(layout, mesh=mesh(pp=4, tp=2), sequence_parallel=True)
    assert seconds("pipeline", divided, joined=1) == pytest.approx((8 + 3) * one / 2)


def test_zero_3_gathers_twice_and_scatters_once_for_each_micro_batch() -> None:
    # Rajbhandari et al. 2020, arXiv 1910.02054, section 7: 3 (d - 1) / d of the parameters, here of the layers; the
    # network is so slow that computing hides nothing.
    slow = replace(wire(), network_bytes_per_s=1e6)
    layout = Layout(mesh=mesh(dp_shard=8), micro_batches=2, state=STATES["narrow"])
    step = predict_step(LLAMA, layout, slow, constants=EXACT)
    sent = 2 * 3 * 7 / 8 * (32 * LLAMA.parameters.layer * 2) / 1e6
    assert step.seconds == pytest.approx(sent, rel=1e-3)
    # Parameters that stay gathered are gathered once a step; scattered float32 gradients are twice as many bytes.
    once = predict_step(LLAMA, replace(layout, reshard=False), slow, constants=EXACT)
    assert once.seconds == pytest.approx(sent / 2, rel=1e-2)
    # Stages of a pipeline gather and scatter once a step, here 2 of 3 P and the larger of both stages.
    pipeline = Layout(mesh=mesh(dp_shard=8, pp=2), micro_batches=4, reshard=False, state=STATES["narrow"])
    found = predict_step(LLAMA, pipeline, slow, constants=EXACT).terms
    half = 7 / 8 * (16 * LLAMA.parameters.layer + LLAMA.parameters.head) * (2 + 2) / 1e6
    assert found["sharding"] == 0 and found["replicas"] == pytest.approx(half, rel=1e-3)
    wide = predict_step(LLAMA, replace(layout, state=STATES["float32"]), slow, constants=EXACT)
    assert wide.seconds == pytest.approx(sent * 4 / 3, rel=1e-3)


@pytest.mark.parametrize(("zero", "size"), [(0, 4 + 4), (1, 4 + 2)])
def test_replicas_reduce_gradients_once_and_gather_what_zero_1_updates(zero: int, size: int) -> None:
    axis = {"dp_shard": 8} if zero else {"dp_replicate": 8}
    layout = Layout(mesh=mesh(**axis), micro_batches=3, zero=zero, state=STATES["megatron"])  # type: ignore[arg-type]
    parts = LLAMA.parameters
    sent = 7 / 8 * size * (32 * parts.layer + parts.embedding + parts.head) / RATE
    assert seconds("replicas", layout, software="megatron-deepspeed") == pytest.approx(sent, rel=1e-6)


def test_cp_passes_keys_and_values_on_and_attention_hides_most_of_it() -> None:
    slow = replace(wire(), network_bytes_per_s=1e6)
    layout = Layout(mesh=mesh(cp=4), zero=0)
    sent = 3 * (8192 / 4) * 2 * LLAMA.keys * 2 / 1e6
    found = predict_step(LLAMA, layout, slow, constants=EXACT).terms["context"]
    # Liu et al. 2023, arXiv 2310.01889: c - 1 steps, and their gradients too in the backward pass.
    assert found == pytest.approx(32 * 3 * 1.1 * sent, rel=1e-2)
    assert seconds("context", layout) < 32 * 3 * sent * 1e6 / RATE


def test_terms_sum_to_the_step_and_the_largest_one_bounds_it() -> None:
    layout = Layout(mesh=mesh(dp_shard=2, pp=2, cp=2, tp=2), micro_batches=4, recomputation="full", zero=1)
    found = predict_step(LLAMA, layout, A100)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.bound == "matmul" and min(found.terms.values()) >= 0
    assert found.tokens_per_s == pytest.approx(2 * 4 * 8192 / found.seconds)


_POWERS = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(
    tp=_POWERS, pp=_POWERS, cp=st.sampled_from([1, 2, 4]), dp=_POWERS, zero=st.sampled_from([0, 1, 3]), data=st.data()
)
def test_more_work_or_less_bandwidth_is_never_faster(
    tp: int, pp: int, cp: int, dp: int, zero: int, data: st.DataObject
) -> None:
    axis = {"dp_shard" if zero else "dp_replicate": dp}
    layout = Layout(
        mesh=mesh(**axis, tp=tp, pp=pp, cp=cp),
        zero=zero,  # type: ignore[arg-type]
        micro_batch=data.draw(_POWERS),
        micro_batches=data.draw(_POWERS),
        recomputation=data.draw(st.sampled_from(["none", "selective", "matmuls"])),
        attention=data.draw(st.sampled_from(["flash", "materialised"])),
    )
    base = predict_step(LLAMA, layout, H100).seconds
    slower = replace(H100, network_bytes_per_s=H100.network_bytes_per_s / 4)
    worse = [
        predict_step(LLAMA, replace(layout, micro_batch=2 * layout.micro_batch), H100),
        predict_step(LLAMA, replace(layout, micro_batches=2 * layout.micro_batches), H100),
        predict_step(LLAMA, replace(layout, recomputation="full"), H100),
        predict_step(LLAMA, replace(layout, kernels="eager"), H100),
        predict_step(LLAMA, layout, slower),
        predict_step(LLAMA, layout, replace(H100, memory_bytes_per_s=H100.memory_bytes_per_s / 2)),
        predict_step(replace(LLAMA, layers=LLAMA.layers * 2), layout, H100),
        predict_step(LLAMA, layout, H100, sequence=16384),
    ]
    assert base > 0
    assert [step.seconds for step in worse if step.seconds < base * (1 - 1e-9)] == []


def test_a_gpu_without_the_precision_is_refused() -> None:
    with refused("HT-prediction-not-possible", gpu="a100-sxm-80", precision="fp8"):
        predict_step(LLAMA, Layout(precision="fp8"), A100)
    with refused("HT-prediction-not-possible", gpu="v100-sxm", precision="bf16"):
        predict_step(LLAMA, Layout(), System.of("v100-sxm", network_bytes_per_s=1e9))
    with refused("HT-choice-unknown", name="megatron"):
        predict_step(LLAMA, Layout(), A100, software="megatron")


def test_power_holds_back_what_has_less_of_it_for_its_rate() -> None:
    assert A100.held_back == 1
    assert H100.held_back == pytest.approx(0.7075, rel=1e-3)
    rack = System.of("gb200", gpus_per_node=4, network_bytes_per_s=50e9)
    assert rack.joined == 72 and H100.joined == 8


@pytest.mark.parametrize("run", json.loads(Path(__file__).with_name("published.json").read_text())["runs"])
def test_published_runs_are_met_within_a_third(run: dict[str, object]) -> None:
    layout = Layout(**{**run["layout"], "mesh": mesh(**run["layout"]["mesh"]), "state": STATES[run["state"]]})  # type: ignore[index, dict-item]
    system = System.of(run["gpu"], network_bytes_per_s=run["network_bytes_per_s"])  # type: ignore[arg-type]
    found = predict_step(
        named(run["network"]),  # type: ignore[arg-type]
        layout,
        system,
        software=run["software"],  # type: ignore[arg-type]
        sequence=run.get("sequence"),  # type: ignore[arg-type]
    )
    assert found.tokens_per_s / layout.ranks == pytest.approx(run["tokens_per_s_per_gpu"], rel=1 / 3)


def test_every_constant_changes_some_step() -> None:
    """One that nothing reads would be fitted to noise."""
    eager = Layout(mesh=mesh(dp_replicate=2, dp_shard=2, pp=2, cp=2, tp=2), kernels="eager", sequence_parallel=True)
    both = (replace(eager, attention="materialised"), replace(eager, asynchronous_tp=True, precision="fp8"))
    replicated = Layout(mesh=mesh(dp_shard=16), zero=1)
    cases = [(layout, gpu) for layout in (eager, replicated) for gpu in ("a100-sxm-80", "h100-sxm", "gb200", "mi300x")]
    cases += [(replace(eager, precision="fp16"), gpu) for gpu in ("p100", "v100-sxm", "l40s")]
    cases += [(layout, "h100-sxm") for layout in both] + [(replace(eager, precision="fp4"), "gb200")]

    def times(values: Mapping[str, float]) -> list[float]:
        systems = [System.of(gpu, network_bytes_per_s=50e9) for _, gpu in cases]
        return [
            predict_step(gpt, layout, system, software="nemo", constants=values).seconds
            for gpt in (LLAMA, named("gpt2"))
            for (layout, _), system in zip(cases, systems, strict=True)
        ]

    base = times(step_constants())
    names = [*step_file().constants, "software.nemo"]
    moved = {name: times({**step_constants(), name: 2 * step_constants()[name]}) for name in names}
    assert [name for name in names if moved[name] == base] == []
