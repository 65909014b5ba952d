"""Spans of batch statistics that the ranks' shares of a batch come out at, and those that they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.requirements import ranks_together, require_span
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.data.sampling import global_batches, parts, share
from support.refusals import refused


def with_span(
    span: int | str | None, *, size: int, micro_batch: int | None = None, more: tuple[str, ...] = ()
) -> Recipe:
    return load_recipe(
        "digits",
        [
            "model.name=resnet18",
            f"model.batch_norm.span={'null' if span is None else span}",
            f"batch.size={size}",
            f"batch.micro_batch={'null' if micro_batch is None else micro_batch}",
            "batch.drop_last=true",
            *more,
        ],
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("mlperf-resnet50@1632", 8),
        ("mlperf-resnet50@3264", 8),
        ("mlperf-resnet50@8192", 1),
        ("mlperf-resnet50@8192", 64),
        ("mlperf-resnet50@8192", 256),
        ("mlperf-resnet50@65536", 512),
        ("mlperf-resnet50@65536", 4096),
        ("goyal2017", 7),
        ("akiba2017", 3),
    ],
)
def test_published_spans_come_out(name: str, ranks: int) -> None:
    require_span(load_recipe(name).at(ranks), ranks)


@pytest.mark.parametrize(
    ("recipe", "ranks", "fault", "values"),
    [
        (with_span(3, size=64), 8, "HT-batch-norm-span-not-divisible", {"span": 3, "images": 8}),
        (with_span(12, size=64), 8, "HT-batch-norm-span-not-divisible", {"span": 12}),
        (with_span(128, size=64), 8, "HT-batch-norm-span-not-divisible", {"span": 128}),
        (
            with_span(8, size=64),
            3,
            "HT-batch-norm-span-not-divisible",
            {"span": 8, "ranks": 3, "images": 22},
        ),
        (
            with_span(5, size=64, micro_batch=6),
            4,
            "HT-batch-norm-span-not-divisible",
            {"span": 5, "ranks": 4},
        ),
        (
            with_span(16, size=64, more=("fault_tolerance.lost_rank=shrink",)),
            *(8, "HT-keys-not-together", {"span": 16, "together": 2}),
        ),
        (
            with_span("world", size=64, more=("fault_tolerance.lost_rank=shrink",)),
            *(2, "HT-keys-not-together", {"span": "world", "together": 2}),
        ),
    ],
)
def test_spans_that_do_not_come_out(recipe: Recipe, ranks: int, fault: str, values: dict[str, object]) -> None:
    with refused(fault, **values) as caught:
        require_span(recipe.at(ranks), ranks)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@given(
    size=st.integers(1, 200),
    ranks=st.integers(1, 9),
    micro_batch=st.none() | st.integers(1, 60),
    span=st.integers(1, 120),
)
def test_what_is_not_refused_has_that_many_images_everywhere(
    size: int, ranks: int, micro_batch: int | None, span: int
) -> None:
    recipe = with_span(span, size=size, micro_batch=micro_batch).at(ranks)
    try:
        require_span(recipe, ranks)
    except HpctrainError:
        return
    (batch,) = global_batches(np.arange(size), size, drop_last=True)
    count = recipe.batch.parts(size, ranks)
    pieces = [[len(piece) for piece in parts(share(batch, rank, ranks), count)] for rank in range(ranks)]
    (at_once,) = {length for rank in pieces for length in rank}
    together = ranks_together(span, at_once, ranks)
    assert ranks % together == 0
    assert together * at_once % span == 0
    assert together == 1 or together * at_once == span
