"""Spans of batch statistics that the ranks' shares of a batch come out at, and those that they do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.batch_statistics import ranks_together, require_span
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.data.sampling import global_batches, parts, share


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
        ("mlperf-resnet50@3264", 16),
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
    ("recipe", "ranks", "said"),
    [
        (
            with_span(3, size=64),
            8,
            "span=3 does not divide the 8 images that a rank computes at once\n  --set batch.mic",
        ),
        (with_span(12, size=64), 8, "span=12 is not a multiple of the 8 images that a rank computes at once"),
        (with_span(24, size=64), 8, "span=24 is what 3 ranks compute at once .8 each., and 8 ranks do not make groups"),
        (with_span(128, size=64), 8, "span=128 is what 16 ranks compute at once"),
        (
            with_span(8, size=64),
            3,
            "span=8 needs parts of equal size, and batch.size=64 over 3 ranks has parts of 22 and",
        ),
        (with_span(5, size=64, micro_batch=6), 4, "span=5 needs parts of equal size, and batch.size=64 over 4 ranks"),
        (
            with_span(16, size=64, more=("fault_tolerance=shrink",)),
            8,
            "span=16 joins 2 ranks, and fault_tolerance: shrink continues without some",
        ),
        (with_span("world", size=64, more=("fault_tolerance=shrink",)), 2, "span=world joins 2 ranks, and fault_toler"),
    ],
)
def test_spans_that_do_not_come_out(recipe: Recipe, ranks: int, said: str) -> None:
    with pytest.raises(HpctrainError, match=said) as caught:
        require_span(recipe.at(ranks), ranks)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_what_needs_no_other_rank_goes_on_without_some() -> None:
    for span in (None, 8, 4):
        require_span(with_span(span, size=64, more=("fault_tolerance=shrink",)).at(8), 8)
    require_span(with_span("world", size=64, more=("fault_tolerance=shrink",)).at(1), 1)


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
