"""The published recipes: their rates are those of their sources, written out here step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from hpctrain.data.images import size_at
from hpctrain.optim.schedule import learning_rate, sgd_share
from hpctrain.recipes.entries import Listed, all_entries, load_entry
from hpctrain.recipes.load import load_recipe
from hpctrain.recipes.schema import Recipe

IMAGES = 1_281_167

# The rate at a step, counted from 0.
Rate = Callable[[int], float]


def goyal(batch: int) -> tuple[int, int, float, Rate]:
    steps = IMAGES // batch
    scaled = 0.1 * batch / 256

    def rate(step: int) -> float:
        if step < 5 * steps:
            # The paper's warm-up climbs, and below 256 there is nothing to climb.
            begin = 0.1 if batch >= 256 else scaled
            return begin + step * (scaled - begin) / (5 * steps)
        return scaled * math.pow(0.1, sum(step >= milestone * steps for milestone in (30, 60, 80)))

    return steps, 90, 5, rate


def you(batch: int, peak: float, warmup: int) -> tuple[int, int, float, Rate]:
    steps = IMAGES // batch
    begin, end = warmup * steps, 100 * steps
    return steps, 100, warmup, lambda t: peak * t / begin if t < begin else peak * ((end - t) / (end - begin)) ** 2


def lamb() -> tuple[int, int, float, Rate]:
    steps = IMAGES // 32768
    begin, end = 20 * steps, 90 * steps
    return steps, 90, 20, lambda t: 0.04 * t / begin if t <= begin else 0.04 * (end - t) / (end - begin)


def akiba() -> tuple[int, int, float, Rate]:
    steps = IMAGES // 32768
    base = 0.1 * 32768 / 256
    parts = [0.5] * 40 + [0.075] * 30 + [0.01] * 15 + [0.001] * 5
    return steps, 90, 0, lambda t: base * parts[t // steps]


def mlperf(batch: int, peak: float, warmup: int, decay_steps: int, epochs: int) -> tuple[int, int, float, Rate]:
    steps = IMAGES // batch
    begin = warmup * steps

    def rate(step: int) -> float:
        if step <= begin:
            return peak * step / begin
        done = min(step - begin, decay_steps)
        return (peak - 0.0001) * ((decay_steps - done) / decay_steps) ** 2 + 0.0001

    return steps, epochs, warmup, rate


def nvidia() -> tuple[int, int, float, Rate]:
    steps = IMAGES // 2048

    def rate(step: int) -> float:
        epoch = step // steps
        return 2.048 * (epoch + 1) / 8 if epoch < 8 else 2.048 * (1 + math.cos(math.pi * (epoch - 8) / 82)) / 2

    return steps, 90, 8, rate


def ffcv(epochs: int) -> tuple[int, int, float, Rate]:
    steps = IMAGES // 4096

    def at(epoch: float) -> float:
        return 1.7 * (0.0001 + 0.9999 * epoch / 2) if epoch < 2 else 1.7 * (epochs - epoch) / (epochs - 2)

    # Between two epochs the source goes in equal steps from the one's rate to the other's.
    def rate(step: int) -> float:
        epoch, within = divmod(step, steps)
        return at(epoch) + (at(epoch + 1) - at(epoch)) * within / steps if within else at(epoch)

    return steps, epochs, 2, rate


# Ranks, then steps of an epoch, epochs, epochs of warm-up, and the rate.
PUBLISHED = {
    ("goyal2017", 1): goyal(32),
    ("goyal2017", 8): goyal(256),
    ("goyal2017", 256): goyal(8192),
    ("goyal2017", 2048): goyal(65536),
    ("you2017-lars@256", 8): you(256, 4, 0),
    ("you2017-lars@1024", 8): you(1024, 9, 5),
    ("you2017-lars@8192", 8): you(8192, 30, 5),
    ("you2017-lars@16384", 8): you(16384, 33, 12),
    ("you2017-lars@32768", 8): you(32768, 40, 12),
    ("akiba2017", 8): akiba(),
    ("lamb", 8): lamb(),
    ("mlperf-resnet50@1632", 8): mlperf(1632, 7.4, 2, 27476, 37),
    ("mlperf-resnet50@3264", 8): mlperf(3264, 10.5, 2, 37 * 392 - 2 * 392 + 1, 37),
    ("mlperf-resnet50@8192", 64): mlperf(8192, 17, 5, 6095, 44),
    ("mlperf-resnet50@65536", 512): mlperf(65536, 24.699, 31, 1133, 91),
    ("nvidia-dle", 8): nvidia(),
    ("ffcv-rn50@16", 8): ffcv(16),
    ("ffcv-rn50@24", 8): ffcv(24),
    ("ffcv-rn50@32", 8): ffcv(32),
    ("ffcv-rn50@40", 8): ffcv(40),
    ("ffcv-rn50@56", 8): ffcv(56),
    ("ffcv-rn50@88", 8): ffcv(88),
}

MOMENTUM = {"lamb": 0.0, "nvidia-dle": 0.875, "mlperf-resnet50@65536": 0.951807}


def runnable() -> Iterator[Recipe]:
    return (entry for entry in all_entries() if isinstance(entry, Recipe) and entry.data.name == "imagenet")


def test_no_recipe_is_left_out() -> None:
    assert {recipe.name for recipe in runnable()} == {name for name, _ in PUBLISHED}


@pytest.mark.parametrize(("name", "ranks"), PUBLISHED)
def test_rate_and_momentum_are_those_of_the_source(name: str, ranks: int) -> None:
    steps, epochs, warmup, expected = PUBLISHED[name, ranks]
    recipe = load_recipe(name).at(ranks)
    rate = learning_rate(recipe, IMAGES)
    assert (rate.iterations_per_epoch, recipe.epochs) == (steps, epochs)
    boundaries = {epoch * steps + offset for epoch in range(epochs) for offset in (0, 1, steps // 2, steps - 1)}
    for step in sorted(boundaries | set(range(math.ceil(warmup * steps) + 2))):
        assert rate(step) == pytest.approx(expected(step), rel=1e-12, abs=1e-18), step
    assert recipe.optimizer.momentum == MOMENTUM.get(name, 0.9)


def test_goyal_in_the_papers_own_numbers() -> None:
    rate = learning_rate(load_recipe("goyal2017").at(256), IMAGES)
    assert [rate(epoch * 156) for epoch in (0, 5, 30, 60, 80)] == pytest.approx([0.1, 3.2, 0.32, 0.032, 0.0032])


def test_the_points_of_mlperf_end_where_their_decay_steps_say() -> None:
    """decay_steps is T - W + 1: the last of T steps, which is step T - 1, is two short of the end rate."""
    for name, last in (("mlperf-resnet50@1632", 37 * 785 - 1), ("mlperf-resnet50@3264", 37 * 392 - 1)):
        recipe = load_recipe(name).at(8)
        steps = recipe.schedule.decay_steps
        assert steps is not None
        peak, end = recipe.optimizer.learning_rate, 1e-4
        assert learning_rate(recipe, IMAGES)(last) == pytest.approx((peak - end) * (2 / steps) ** 2 + end, rel=1e-12)
    # Submissions counted images across epochs: 6875 and 1738 steps, of which 781 and 606 are the warm-up.
    assert (6875 - int(5 * IMAGES / 8192) + 1, 1738 - int(31 * IMAGES / 65536) + 1) == (6095, 1133)


def test_the_part_of_sgd_in_akibas_transition() -> None:
    transition = load_recipe("akiba2017").optimizer.transition
    assert transition is not None
    expected = {0: math.exp(-4) / 2, 5: math.exp(-2) / 2, 10: 0.5, 11: 0.7, 12: 0.9, 12.5: 1.0, 40: 1.0}
    assert {epoch: sgd_share(epoch, transition) for epoch in expected} == pytest.approx(expected, rel=1e-12)
    # The rate of RMSprop alone, in the first 40 epochs.
    assert transition.rmsprop_rate * 0.5 * 12.8 == pytest.approx(3e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("variant", "start", "end"), [(16, 11, 13), (24, 17, 20), (32, 23, 27), (40, 29, 34), (56, 41, 48), (88, 65, 76)]
)
def test_ffcvs_images_grow_by_multiples_of_32_in_its_ramp(variant: int, start: int, end: int) -> None:
    recipe = load_recipe(f"ffcv-rn50@{variant}")
    for epoch in range(recipe.epochs):
        # From 160 to 192 in equal parts, so that 192 is the nearer one behind the middle; there, Python and NumPy round
        # 5.5 to 6.
        assert size_at(recipe.images, epoch) == (192 if 2 * epoch >= start + end else 160), epoch


@pytest.mark.parametrize(
    ("batch", "error", "deviation"),
    [(256, 23.60, 0.12), (8192, 23.74, 0.09), (32768, 27.55, 0.28), (65536, 33.96, 0.80)],
)
def test_goyals_errors_are_reported_as_accuracies(batch: int, error: float, deviation: float) -> None:
    row = load_recipe("goyal2017").reported_at(batch)
    assert row is not None
    assert row.deviation is not None
    assert (1 - row.value) * 100 == pytest.approx(error)
    assert row.deviation * 100 == pytest.approx(deviation)


def test_what_is_reported_can_be_compared_with_a_run() -> None:
    for recipe in runnable():
        assert {row.metric for row in recipe.reported} == {"test_accuracy"}
        assert all(0.6 < row.value < 0.82 for row in recipe.reported)
        ranks = 256 if recipe.name == "goyal2017" else 8
        assert recipe.at(ranks).reported_at(recipe.at(ranks).global_batch) is not None


@pytest.mark.parametrize(
    "name", ["torchvision-v2", "jia2018", "mikami2018", "ying2018", "yamazaki2019", "mlperf-resnet50@32768"]
)
def test_what_is_not_established_is_listed(name: str) -> None:
    entry = load_entry(name)
    assert isinstance(entry, Listed)
    assert entry.name == name
    assert entry.source
    assert entry.missing
