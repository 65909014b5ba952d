"""The learning rate against closed forms, and what holds for every schedule."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpctrain.optim.schedule import LearningRate
from hpctrain.recipes.schema import Schedule

IMAGENET = 1_281_167


def rate(batch_size: int = 64, per_epoch: int = 10, epochs: int = 20, base: float = 0.1, **schedule) -> LearningRate:
    return LearningRate(
        schedule=Schedule(**schedule),
        learning_rate=base,
        batch_size=batch_size,
        iterations_per_epoch=per_epoch,
        epochs=epochs,
    )


@st.composite
def rates(draw) -> LearningRate:
    name = draw(st.sampled_from(["constant", "cosine", "step"]))
    epochs = draw(st.integers(2, 50))
    base_batch = draw(st.none() | st.integers(1, 4096))
    warmup = draw(st.floats(0, epochs)) if base_batch else 0.0
    milestones = draw(st.lists(st.floats(warmup + 0.01, epochs + 1), min_size=1, max_size=4, unique=True))
    return rate(
        batch_size=draw(st.integers(1, 65536)),
        per_epoch=draw(st.integers(1, 300)),
        epochs=epochs,
        base=draw(st.floats(1e-4, 10)),
        name=name,
        base_batch=base_batch,
        warmup_epochs=warmup,
        milestones=tuple(sorted(milestones)) if name == "step" else (),
    )


def test_goyal_2017_at_8192():
    goyal = rate(
        8192, math.ceil(IMAGENET / 8192), 90, name="step", base_batch=256, warmup_epochs=5, milestones=(30, 60, 80)
    )
    at = [goyal(epoch * 157) for epoch in (0, 5, 29, 30, 60, 80, 90)]
    assert at == pytest.approx([0.1, 3.2, 3.2, 0.32, 0.032, 0.0032, 0.0032], rel=1e-12)
    assert goyal(30 * 157 - 1) == pytest.approx(3.2)
    # the same increment after every iteration, not after every epoch
    steps = [goyal(iteration + 1) - goyal(iteration) for iteration in range(5 * 157)]
    assert steps == pytest.approx([3.1 / (5 * 157)] * len(steps), rel=1e-9)


def test_cosine_after_warmup():
    cosine = rate(name="cosine", base_batch=64, warmup_epochs=4)
    assert cosine(40) == pytest.approx(0.1)
    assert cosine(40 + 80) == pytest.approx(0.05)
    assert cosine(40 + 40) == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)
    assert cosine(200) == pytest.approx(0, abs=1e-15)


def test_constant_without_a_base_batch_is_the_rate_itself():
    assert {rate()(iteration) for iteration in range(201)} == {0.1}


def test_warmup_over_the_whole_run_ends_at_the_scaled_rate():
    assert rate(name="cosine", base_batch=32, warmup_epochs=20)(200) == pytest.approx(0.2)


@given(rates())
def test_warmup_climbs_steadily_from_the_base_rate_to_the_scaled_one(rate):
    warmup = math.floor(rate.schedule.warmup_epochs * rate.iterations_per_epoch)
    climb = [rate(iteration) for iteration in range(0, warmup + 1, 1 + warmup // 50)]
    if rate.schedule.warmup_epochs:
        assert rate(0) == pytest.approx(rate.learning_rate)
    assert climb in (sorted(climb), sorted(climb, reverse=True))
    low, high = sorted([rate.learning_rate, rate.peak])
    assert all(low * (1 - 1e-12) <= value <= high * (1 + 1e-12) for value in climb)


@given(rates())
def test_no_jump_where_the_warmup_ends(rate):
    warmup = rate.schedule.warmup_epochs * rate.iterations_per_epoch
    before, after = math.ceil(warmup) - 1, math.ceil(warmup)
    if before < 0 or any(warmup <= m * rate.iterations_per_epoch <= after for m in rate.schedule.milestones):
        return
    one_climb = abs(rate.peak - rate.learning_rate) / warmup
    total = rate.epochs * rate.iterations_per_epoch
    one_decay = rate.peak * math.pi / 2 / (total - warmup) if total > warmup else 0.0
    assert abs(rate(after) - rate(before)) <= one_climb + one_decay + 1e-9 * rate.peak


@given(rates())
def test_never_climbs_after_the_warmup_and_stays_positive(rate):
    first = math.ceil(rate.schedule.warmup_epochs * rate.iterations_per_epoch)
    total = rate.epochs * rate.iterations_per_epoch
    values = [rate(iteration) for iteration in range(first, total, 1 + total // 100)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(values))
    assert all(value > 0 for value in values)


def test_a_milestone_within_the_warmup_is_refused():
    with pytest.raises(ValidationError, match="warm-up"):
        Schedule(name="step", milestones=(4,), warmup_epochs=5)
