"""Ranges of a transformer's step: what is not known, and what nobody else has published, makes them wider."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.model_sizes import named
from hpctrain.control.predict.transformers.ranges import shipped_ranges, step_spreads
from hpctrain.control.predict.transformers.rates import System
from hpctrain.control.predict.transformers.step import Setup
from support.meshes import mesh

LLAMA = named("llama3-8b")
H100 = System.of("h100-sxm", network_bytes_per_s=50e9)
LAYOUT = Layout(mesh=mesh(dp_shard=64), micro_batch=1)


def width(
    layout: Layout = LAYOUT, system: System = H100, *, software: str = "pytorch", unstated: tuple[str, ...] = ()
) -> float:
    """Half the width of the range's logarithm."""
    return shipped_ranges().half_width(step_spreads(Setup(LLAMA, layout, system, software), unstated))


def test_what_is_not_stated_or_not_published_by_others_makes_a_range_wider() -> None:
    known = width()
    assert width(unstated=("micro_batch",)) > known
    assert width(unstated=("micro_batch", "zero_stage")) > width(unstated=("micro_batch",))
    assert width(software="llm.c") > known
    assert width(system=System.of("l40s", network_bytes_per_s=50e9)) > known
    assert width(replace(LAYOUT, mesh=mesh(dp_shard=2**17))) > known


def test_a_network_that_is_assumed_counts_by_what_a_slower_one_would_do() -> None:
    assert width(unstated=("network",)) > width()
    slow = System.of("h100-sxm", network_bytes_per_s=12.5e9)
    found = step_spreads(Setup(LLAMA, LAYOUT, slow, "pytorch"), ("network",))
    hidden = step_spreads(Setup(LLAMA, replace(LAYOUT, micro_batch=64), slow, "pytorch"), ("network",))
    assert hidden["unstated.network"] < 0.2 * found["unstated.network"]
