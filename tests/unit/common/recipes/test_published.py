"""The published recipes: their rates are those of their sources, written out here step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from hpctrain.common.optim.learning_rate import learning_rate, sgd_share
from hpctrain.common.recipes.entries import all_entries
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.data.images import size_at

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
    """nvcaffe's GetLearningRate at c2e02b2c: rampup_lr + (base_lr - rampup_lr) x iter / rampup_interval, then poly."""
    steps = IMAGES // batch
    interval, max_iter = warmup * steps, 100 * steps
    return steps, 100, warmup, nvcaffe(peak, 1.0, interval, max_iter)


def nvcaffe(base_lr: float, rampup_lr: float, rampup_interval: int, max_iter: int) -> Rate:
    def rate(iteration: int) -> float:
        if iteration < rampup_interval:
            return rampup_lr + (base_lr - rampup_lr) * (iteration / rampup_interval)
        return base_lr * (1 - min(iteration, max_iter) / max_iter) ** 2

    return rate


def lamb() -> tuple[int, int, float, Rate]:
    """create_optimizer of the authors' optimization.py, with num_train_steps 3519 and num_warmup_steps 782."""

    def rate(step: int) -> float:
        return step * 0.04 / 782 if step <= 782 else (3519 - step) * 0.04 / (3519 - 782)

    return IMAGES // 32768, 90, 782 / 39, rate


def google(batch: int, base: float, w_epochs: int, train_steps: int, epochs: int) -> tuple[int, int, float, Rate]:
    """poly_rate_schedule of lars_util.py, in tensorflow/tpu and in Google's submissions to MLPerf."""

    def rate(global_step: int) -> float:
        current_epoch = global_step / (IMAGES / batch)
        w_steps = w_epochs * IMAGES // batch
        done = min(max(1, global_step - w_steps), train_steps - w_steps + 1)
        poly_rate = (base - 0.0001) * (1 - done / (train_steps - w_steps + 1)) ** 2 + 0.0001
        return base * current_epoch / w_epochs if current_epoch <= w_epochs else poly_rate

    return IMAGES // batch, epochs, w_epochs * IMAGES / batch / (IMAGES // batch), rate


def mxnet(workers: int, each: int, base_lr: float, warmup: int, epochs: int) -> tuple[int, int, float, Rate]:
    """PolySchedule and get_epoch_size of NVIDIA's and Dell's fit.py; Intel's PolyScheduler is the same."""
    epoch_size = math.ceil(int(IMAGES / workers) / each)
    warmup_iterations, iterations = epoch_size * warmup, epoch_size * epochs

    def rate(iteration: int) -> float:
        if iteration <= warmup_iterations:
            return base_lr * (iteration / warmup_iterations)
        part = (iteration - warmup_iterations) / (iterations - warmup_iterations)
        return 0.0001 + (base_lr - 0.0001) * (1 - part) ** 2

    return epoch_size, epochs, warmup, rate


def fujitsu() -> tuple[int, int, float, Rate]:
    """decay_power of explorer.py, with decay_steps 780 from the end of the warm-up on, and its end_lr_ratio."""
    epoch_size = math.ceil(int(IMAGES / 2048) / 42)

    def rate(current: int) -> float:
        if current < 36 * epoch_size:
            return 13 * current / (36 * epoch_size)
        done = min(current - 36 * epoch_size, 780) / 780
        return 13 * ((1 - 0.0025) * (1 - done) ** 2.2 + 0.0025)

    return epoch_size, 90, 36, rate


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


def torchvision() -> tuple[int, int, float, Rate]:
    """torch.optim.lr_scheduler's LinearLR and CosineAnnealingLR, one after the other, each stepped once an epoch."""
    # RASampler: images rounded down to a multiple of 256.
    steps = IMAGES // 256 * 256 // 1024

    def rate(step: int) -> float:
        epoch = step // steps
        if epoch < 5:
            return 0.5 * (0.01 + 0.99 * epoch / 5)
        return 0.5 * (1 + math.cos(math.pi * (epoch - 5) / 595)) / 2

    return steps, 600, 5, rate


def rsb(epochs: int, peak: float, images: int) -> tuple[int, int, float, Rate]:
    """timm's CosineLRScheduler without warmup_prefix, stepped once an epoch."""
    steps = images // 2048

    def rate(step: int) -> float:
        epoch = step // steps
        if epoch < 5:
            return 1e-4 * peak + epoch * (peak - 1e-4 * peak) / 5
        return 1e-6 + 0.5 * (peak - 1e-6) * (1 + math.cos(math.pi * epoch / epochs))

    return steps, epochs, 5, rate


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
    ("you2017-lars@1024-file", 8): (1251, 100, 10000 / 1251, nvcaffe(9, 1, 10_000, 125_000)),
    ("akiba2017", 8): akiba(),
    ("lamb", 8): lamb(),
    ("ying2018", 8): google(32768, 34, 12, 3558, 91),
    ("fujitsu2019", 8): fujitsu(),
    ("mlperf-resnet50@1632", 8): mlperf(1632, 7.4, 2, 27476, 37),
    ("mlperf-resnet50@3264", 8): mlperf(3264, 10.5, 2, 37 * 392 - 2 * 392 + 1, 37),
    ("mlperf-resnet50@4096", 32): mxnet(32, 128, 10, 5, 42),
    ("mlperf-resnet50@8192", 64): google(8192, 17, 5, 6875, 44),
    ("mlperf-resnet50@33280", 512): mxnet(512, 65, 21.2, 16, 58),
    ("mlperf-resnet50@65536", 512): google(65536, 24.699, 31, 1738, 91),
    ("mlperf-resnet50@1632-v1", 4): mxnet(4, 408, 7.4, 2, 37),
    ("mlperf-resnet50@3200", 8): mxnet(8, 400, 11.0, 2, 37),
    ("mlperf-resnet50@20480", 512): mxnet(512, 40, 22.0, 12, 52),
    ("mlperf-resnet50@32768-v1", 512): google(32768, 29, 18, 2355, 60),
    ("mlperf-resnet50@35840", 1024): mxnet(1024, 35, 21.9, 17, 60),
    ("mlperf-resnet50@57344", 1792): mxnet(3584, 16, 23.0, 32, 78),
    ("nvidia-dle", 8): nvidia(),
    ("ffcv-rn50@16", 8): ffcv(16),
    ("ffcv-rn50@24", 8): ffcv(24),
    ("ffcv-rn50@32", 8): ffcv(32),
    ("ffcv-rn50@40", 8): ffcv(40),
    ("ffcv-rn50@56", 8): ffcv(56),
    ("ffcv-rn50@88", 8): ffcv(88),
    ("torchvision-v2", 8): torchvision(),
    ("rsb2021@A3", 4): rsb(100, 0.008, IMAGES),
}

MOMENTUM = {
    "lamb": 0.0,
    "rsb2021@A3": 0.0,
    "nvidia-dle": 0.875,
    "fujitsu2019": 0.96,
    "mlperf-resnet50@33280": 0.94,
    "mlperf-resnet50@65536": 0.951807,
    "mlperf-resnet50@32768-v1": 0.929,
    "mlperf-resnet50@35840": 0.94,
    "mlperf-resnet50@57344": 0.95,
}


def runnable() -> Iterator[Recipe]:
    return (entry for entry in all_entries() if entry.data.name == "imagenet")


def test_no_recipe_is_left_out() -> None:
    assert {recipe.name for recipe in runnable()} == {name for name, _ in PUBLISHED}


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), PUBLISHED)
def test_rate_and_momentum_are_those_of_the_source(name: str, ranks: int) -> None:
    steps, epochs, warmup, expected = PUBLISHED[name, ranks]
    recipe = load_recipe(name).at(ranks)
    rate = learning_rate(recipe, IMAGES)
    assert (rate.iterations_per_epoch, recipe.epochs) == (steps, epochs)
    boundaries = {epoch * steps + offset for epoch in range(epochs) for offset in (0, 1, steps // 2, steps - 1)}
    drawn = random.Random(name).sample(range(steps * epochs), 20)
    for step in sorted({*boundaries, *drawn, *range(math.ceil(warmup * steps) + 2)}):
        # The parentheses of a source's formula may lie otherwise.
        assert rate(step) == pytest.approx(expected(step), rel=1e-10, abs=1e-18), step
    assert recipe.optimizer.momentum == MOMENTUM.get(name, 0.9)


def test_torchvisions_rates_are_those_that_pytorchs_schedulers_give() -> None:
    torch = pytest.importorskip("torch")
    scheduler = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    both = scheduler.SequentialLR(
        optimizer,
        [
            scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5),
            scheduler.CosineAnnealingLR(optimizer, T_max=595),
        ],
        milestones=[5],
    )
    rate = learning_rate(load_recipe("torchvision-v2").at(8), IMAGES)
    for epoch in range(600):
        assert rate(epoch * 1251 + epoch * 2) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9), epoch
        optimizer.step()
        both.step()


def test_torchvisions_average_keeps_what_its_script_works_out() -> None:
    recipe = load_recipe("torchvision-v2").at(8)
    assert recipe.averaging is not None
    weights = [recipe.averaging.weight(epoch=9, step=step, batch=1024, epochs=600) for step in range(65)]
    assert [step for step, weight in enumerate(weights) if weight is not None] == [0, 32, 64]
    # train.py: adjust = world_size * batch_size * model_ema_steps / epochs
    assert weights[32] == pytest.approx((1.0 - 0.99998) * (8 * 128 * 32 / 600), rel=1e-12)


def test_the_points_of_mlperf_end_where_their_decay_steps_say() -> None:
    """decay_steps is T - W + 1: the last of T steps, which is step T - 1, is two short of the end rate."""
    for name, last in (("mlperf-resnet50@1632", 37 * 785 - 1), ("mlperf-resnet50@3264", 37 * 392 - 1)):
        recipe = load_recipe(name).at(8)
        steps = recipe.schedule.decay_steps
        assert steps is not None
        peak, end = recipe.optimizer.learning_rate, 1e-4
        assert learning_rate(recipe, IMAGES)(last) == pytest.approx((peak - end) * (2 / steps) ** 2 + end, rel=1e-12)
    # As the submissions logged lars_opt_learning_rate_decay_steps.
    for name, logged in (("8192", 6095), ("65536", 1133), ("32768-v1", 1653)):
        assert load_recipe(f"mlperf-resnet50@{name}").schedule.decay_steps == logged


def test_the_part_of_sgd_in_akibas_transition() -> None:
    """The formula as it is published, at the epoch that has begun: ports evaluate it once an epoch."""
    transition = load_recipe("akiba2017").optimizer.transition
    assert transition is not None
    expected = {
        0: math.exp(-4) / 2,
        5: math.exp(-2) / 2,
        10: 0.5,
        11: 0.9,
        11.99: 0.9,
        12: 1.3,
        12.7: 1.3,
        13: 1,
        40: 1,
    }
    assert {epoch: sgd_share(epoch, transition) for epoch in expected} == pytest.approx(expected, rel=1e-12)
    # The rate of RMSprop alone, in the first 40 epochs.
    assert transition.rmsprop_rate * 0.5 * 12.8 == pytest.approx(3e-4, rel=1e-12)


def drawn(entry: Recipe) -> tuple[str, float, bool, str, bool]:
    weights = entry.model.weights
    return weights.fan, weights.scale, weights.truncated, weights.last_layer, entry.model.zero_gamma


def test_networks_are_drawn_as_the_sources_say() -> None:
    normal, tensorflow = ("in", 2.0, False, "normal", False), ("in", 1.0, True, "normal", False)
    expected = {
        "goyal2017": ("out", 2.0, False, "normal", True),
        "nvidia-dle": ("in", 2.0, False, "uniform", False),
        "lamb": (*tensorflow[:4], True),
        "ying2018": (*tensorflow[:4], True),
        "fujitsu2019": normal,
    }
    for recipe in runnable():
        family = recipe.name.partition("@")[0]
        if family == "mlperf-resnet50":
            google = recipe.name.endswith(("@8192", "@65536", "@32768-v1"))
            assert drawn(recipe) == (tensorflow if google else normal), recipe.name
            assert recipe.images.crop_area[0] == (0.08 if recipe.name.endswith("@4096") else 0.05)
        elif family == "ffcv-rn50":
            assert drawn(recipe) == ("out", 2.0, False, "uniform", False)
        elif family in expected:
            assert drawn(recipe) == expected[family], recipe.name
        assert ("main_path_norm" in recipe.optimizer.undecayed) == (family in ("nvidia-dle", "ffcv-rn50"))


@pytest.mark.parametrize(
    ("variant", "start", "end"), [(16, 11, 13), (24, 17, 20), (32, 23, 27), (40, 29, 34), (56, 41, 48), (88, 65, 76)]
)
def test_ffcvs_images_grow_by_multiples_of_32_in_its_ramp(variant: int, start: int, end: int) -> None:
    recipe = load_recipe(f"ffcv-rn50@{variant}")
    for epoch in range(recipe.epochs):
        # From 160 to 192 in equal parts, so that 192 is the nearer one after the middle; there, Python and NumPy round
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
        assert any(row.of_other_values for row in recipe.reported) == (recipe.name == "you2017-lars@1024-file")
        assert recipe.at(ranks).reported_at(recipe.at(ranks).global_batch) is not None
