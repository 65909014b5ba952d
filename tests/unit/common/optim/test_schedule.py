"""The learning rate against closed forms, and what holds for every schedule."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.optim.learning_rate import LearningRate, sgd_share
from hpctrain.common.recipes.optimizers import Transition
from hpctrain.common.recipes.schedule import Schedule
from support.digits_recipes import digits_recipe
from support.refusals import invalid

IMAGENET = 1_281_167


def rate(batch_size: int = 64, per_epoch: int = 10, epochs: int = 20, base: float = 0.1, **schedule) -> LearningRate:
    return LearningRate(
        schedule=Schedule(**schedule),
        learning_rate=base,
        batch_size=batch_size,
        iterations_per_epoch=per_epoch,
        epochs=epochs,
    )


ENDS = ("cosine", "polynomial", "triangular")


@st.composite
def rates(draw) -> LearningRate:
    name = draw(st.sampled_from(["constant", "cosine", "step", "piecewise", "polynomial", "triangular"]))
    epochs = draw(st.integers(2, 50))
    batch, base = draw(st.integers(1, 65536)), draw(st.floats(1e-4, 10))
    base_batch = draw(st.none() | st.integers(1, 4096))
    schedule = {"name": name, "base_batch": base_batch, "held": draw(st.sampled_from(["iteration", "epoch"]))}
    begin = draw(st.floats(0, 10))
    warmup = 0.0
    if name == "triangular":
        schedule |= {"peak_epoch": draw(st.floats(0.01, epochs - 0.01)), "warmup_from": begin}
    elif draw(st.booleans()):
        warmup = draw(st.floats(0.01, epochs))
        schedule |= {"warmup_epochs": warmup, "warmup": draw(st.sampled_from(["gradual", "constant"]))}
        if base_batch is None or draw(st.booleans()):
            schedule["warmup_from"] = begin
    if name in ("step", "piecewise"):
        milestones = draw(st.lists(st.floats(warmup + 0.01, epochs + 1), min_size=1, max_size=4, unique=True))
        schedule["milestones"] = tuple(sorted(milestones))
    if name == "piecewise":
        factor = st.floats(1e-4, 1)
        factors = draw(st.lists(factor, min_size=len(milestones) + 1, max_size=len(milestones) + 1))
        schedule["factors"] = tuple(sorted(factors, reverse=True))
    if name in ENDS:
        schedule["end_rate"] = draw(st.floats(0, 1)) * base * batch / (base_batch or batch)
    if name == "polynomial":
        schedule |= {"power": draw(st.floats(0.5, 4)), "decay_steps": draw(st.none() | st.integers(1, 20000))}
    return rate(batch, draw(st.integers(1, 300)), epochs, base, **schedule)


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


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "polynomial"}, [0.1, 0.1 * 0.75**2, 0.1 * 0.25, 0.1 * 0.25**2, 0]),
        ({"name": "polynomial", "power": 1.0, "end_rate": 0.02}, [0.1, 0.08, 0.06, 0.04, 0.02]),
        ({"name": "polynomial", "decay_steps": 100, "end_rate": 0.001}, [0.1, 0.001 + 0.099 / 4, 0.001, 0.001, 0.001]),
        (
            {"name": "cosine", "end_rate": 0.02},
            [0.1, 0.06 + 0.04 * math.sqrt(0.5), 0.06, 0.06 - 0.04 * math.sqrt(0.5), 0.02],
        ),
        ({"name": "triangular", "peak_epoch": 5, "warmup_from": 0}, [0, 0.1, 0.2 / 3, 0.1 / 3, 0]),
        (
            {"name": "triangular", "peak_epoch": 10, "warmup_from": 0.05, "end_rate": 0.01},
            [0.05, 0.075, 0.1, 0.055, 0.01],
        ),
        ({"name": "piecewise", "milestones": (5, 15), "factors": (0.5, 2, 0.25)}, [0.05, 0.2, 0.2, 0.025, 0.025]),
        ({"name": "step", "milestones": (5, 15), "gamma": 0.5}, [0.1, 0.05, 0.05, 0.025, 0.025]),
        ({"warmup_epochs": 10, "warmup_from": 0}, [0, 0.05, 0.1, 0.1, 0.1]),
        ({"warmup_epochs": 10, "warmup": "constant", "warmup_from": 0.03}, [0.03, 0.03, 0.1, 0.1, 0.1]),
        ({"warmup_epochs": 10, "warmup": "constant", "base_batch": 32}, [0.1, 0.1, 0.2, 0.2, 0.2]),
        ({"warmup_epochs": 10, "base_batch": 128}, [0.05] * 5),
        ({"warmup_epochs": 10, "base_batch": 128, "warmup_from": 0.1}, [0.1, 0.075, 0.05, 0.05, 0.05]),
        ({"warmup_epochs": 8, "warmup_from": 0, "held": "epoch"}, [0.1 / 8, 0.1 * 6 / 8, 0.1, 0.1, 0.1]),
    ],
)
def test_every_quarter_of_a_run_of_20_epochs(schedule, expected):
    assert [rate(**schedule)(epoch * 10) for epoch in (0, 5, 10, 15, 20)] == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )


@given(rates())
def test_a_gradual_warmup_climbs_in_equal_steps_from_where_it_begins_to_the_scaled_rate(rate):
    warmup = rate.schedule.climb_steps(rate.iterations_per_epoch)
    iterations = range(0, math.ceil(warmup), 1 + math.ceil(warmup) // 50)
    if rate.schedule.warmup == "constant":
        assert {rate(iteration) for iteration in iterations} <= {rate.begin}
    elif rate.schedule.held == "iteration":
        line = [rate.begin * (1 - t / warmup) + rate.peak * (t / warmup) for t in iterations]
        assert [rate(iteration) for iteration in iterations] == pytest.approx(line, rel=1e-9, abs=1e-12)


@given(rates())
def test_a_rate_that_is_held_changes_with_the_epoch_only(rate):
    if rate.schedule.held == "iteration":
        return
    steps = rate.iterations_per_epoch
    for epoch in range(rate.epochs):
        assert len({rate(epoch * steps + within) for within in (0, steps // 2, steps - 1)}) == 1


@given(rates())
def test_never_climbs_after_the_warmup_and_ends_where_it_is_told(rate):
    first = math.ceil(rate.schedule.climb_steps(rate.iterations_per_epoch))
    total = rate.epochs * rate.iterations_per_epoch
    values = [rate(iteration) for iteration in range(first, total, 1 + total // 100)]
    if rate.schedule.held == "iteration":
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(values))
    decays = rate.schedule.name in ENDS and not rate.schedule.decay_steps
    if decays and rate.schedule.climb_steps(1) < rate.epochs:
        assert rate(total) == pytest.approx(rate.schedule.end_rate, rel=1e-9, abs=1e-9 * rate.peak)


TRANSITION = Transition(center=10, period=5, rmsprop_rate=1e-3)


@given(st.floats(0, 100))
def test_the_part_of_sgd_is_the_published_formula_at_the_epoch_that_has_begun(epoch):
    e = math.floor(epoch)
    share = sgd_share(epoch, TRANSITION)
    if e < 10:
        assert share == pytest.approx(0.5 * math.exp(2 * (e - 10) / 5), rel=1e-12)
        assert share < 0.5
    elif e < 10 + 5 / 2:
        assert share == pytest.approx(0.5 + 2 * (e - 10) / 5, rel=1e-12)
    else:
        assert share == 1


@given(
    st.floats(0.5, 2000),
    st.integers(1, 5000),
    st.sampled_from(["warmup", "start"]),
    st.floats(0, 0.1),
    st.floats(0.5, 4),
)
def test_a_schedule_in_steps_does_not_depend_on_epochs(warmup, decay, decay_from, end, power):
    chosen = {"warmup_steps": warmup, "decay_steps": decay, "decay_from": decay_from, "end_rate": end, "power": power}
    one, other = (rate(64, steps, epochs, name="polynomial", warmup_from=0, **chosen) for steps, epochs in SIZES)
    begin = math.floor(warmup) if decay_from == "warmup" else 0
    for step in {0, 1, math.floor(warmup), math.ceil(warmup), math.ceil(warmup) + decay // 2, 10**5}:
        if step < warmup:
            expected = 0.1 * step / warmup
        else:
            expected = end + (0.1 - end) * max(0.0, 1 - (step - begin) / decay) ** power
        assert one(step) == other(step) == pytest.approx(expected, rel=1e-9, abs=1e-15)


SIZES = ((10, 20), (157, 3))


def test_a_polynomial_from_the_start_steps_down_where_the_warm_up_ends():
    lars = rate(name="polynomial", warmup_epochs=5, warmup_from=0.02, decay_from="start")
    assert [lars(epoch * 10) for epoch in (0, 5, 10, 20)] == pytest.approx([0.02, 0.1 * 0.75**2, 0.025, 0])
    assert lars(49) == pytest.approx(0.02 + 0.08 * 0.98)
    cosine = rate(name="cosine", warmup_epochs=5, warmup_from=0.02, decay_from="start", end_rate=0.01)
    assert [cosine(epoch * 10) for epoch in (0, 10, 20)] == pytest.approx([0.02, 0.055, 0.01])
    assert cosine(50) == pytest.approx(0.055 + 0.045 * math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ({"name": "step"}, "HT-keys-not-together"),
        ({"name": "cosine", "milestones": (3,)}, "HT-recipe-key-of-another"),
        ({"name": "step", "milestones": (3, 2)}, "HT-keys-not-together"),
        ({"name": "step", "milestones": (3,), "factors": (1, 2)}, "HT-recipe-key-of-another"),
        ({"name": "piecewise", "milestones": (3,), "factors": (1,)}, "HT-keys-not-together"),
        ({"name": "triangular", "peak_epoch": 2}, "HT-keys-not-together"),
        ({"name": "triangular", "warmup_from": 0}, "HT-keys-not-together"),
        (
            {"name": "triangular", "peak_epoch": 2, "warmup_from": 0, "warmup_epochs": 1},
            "HT-keys-not-together",
        ),
        ({"warmup_epochs": 3}, "HT-keys-not-together"),
        ({"name": "polynomial", "warmup_steps": 3, "decay_steps": 9}, "HT-keys-not-together"),
        ({"name": "polynomial", "warmup_steps": 3, "warmup_from": 0}, "HT-keys-not-together"),
        (
            {"name": "polynomial", "warmup_steps": 3, "decay_steps": 9, "warmup_epochs": 1, "warmup_from": 0},
            "HT-keys-not-together",
        ),
        (
            {"name": "polynomial", "warmup_steps": 3, "decay_steps": 9, "warmup_from": 0, "held": "epoch"},
            "HT-keys-not-together",
        ),
        ({"warmup_from": 0.1}, "HT-keys-not-together"),
        ({"name": "step", "milestones": [4], "warmup_epochs": 5}, "HT-keys-not-together"),
        ({"warmup": "constant"}, "HT-keys-not-together"),
    ],
)
def test_schedules_that_cannot_be(schedule, kind):
    with invalid(kind):
        digits_recipe(schedule=schedule)
