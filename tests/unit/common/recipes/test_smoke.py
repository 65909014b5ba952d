"""``--smoke`` makes every recipe small and leaves what it goes through."""

from __future__ import annotations

import json
import math

import pytest

from hpctrain.common.optim.learning_rate import LearningRate, sgd_share
from hpctrain.common.recipes.entries import all_entries
from hpctrain.common.recipes.requirements import require_span
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.report.results import reported_text
from support.golden import check_text

RECIPES = {recipe.name: recipe for recipe in all_entries()}


def schedule(recipe: Recipe, steps: int) -> LearningRate:
    return LearningRate(
        schedule=recipe.schedule,
        learning_rate=recipe.optimizer.learning_rate,
        batch_size=recipe.global_batch,
        iterations_per_epoch=steps,
        epochs=recipe.epochs,
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_stays_a_valid_one(name, ranks):
    small = smoke(RECIPES[name])
    small = Recipe.model_validate_json(small.model_dump_json()).at(ranks)
    assert (small.name, small.epochs, small.global_batch) == (f"{name}-smoke", 3, 16)
    assert small.optimizer.name == RECIPES[name].optimizer.name
    if small.data.name == "imagenet":
        assert (small.images.size, small.images.test_size, small.data.limit) == (64, 64, 256)
        assert small.data.broken_images == "skip"
        assert small.images.test_resize >= 64
    elif small.data.name == "text":
        # In steps of 16.
        assert (small.data.epoch_samples, small.precision) == (1600, "float32")
    else:
        assert (small.data, small.images) == (RECIPES[name].data, RECIPES[name].images)
    require_span(small, ranks)
    assert small.reported_at(16) is None
    check_text("reported-of-smoke", reported_text(small))
    rate = schedule(small, 16)
    rates = [rate(step) for step in range(48)]
    assert all(0 <= value <= rate.peak * (1 + 1e-12) for value in rates) and max(rates) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_the_rate_goes_through_the_same_curve(name):
    """In every thirtieth part of the run it is the same part of the peak, after a warm-up that may begin elsewhere."""
    recipe, small = RECIPES[name], smoke(RECIPES[name])
    if recipe.schedule.held != "iteration" or recipe.schedule.decay_steps or recipe.schedule.end_rate:
        pytest.skip("not the same by nature: the small run has other epochs and steps")
    size = recipe.batch.size or (recipe.batch.per_rank or 0) * (recipe.batch.emulated_ranks or 1)
    large = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"size": size, "per_rank": None})})
    whole, shrunk = schedule(large, 300 * 16), schedule(small.at(1), 300 * 16)
    begin = recipe.schedule.climb_steps(1) / recipe.epochs
    for part in ((number + 0.5) / 30 for number in range(30)):
        if part > begin:
            one, other = (rate(part * rate.epochs * rate.iterations_per_epoch) for rate in (whole, shrunk))
            assert other / shrunk.peak == pytest.approx(one / whole.peak, rel=1e-6)


def test_parts_of_a_batch_and_transitions_stay():
    values = RECIPES["digits"].model_dump(mode="json")
    transition = {"center": 6.0, "period": 5.0, "rmsprop_rate": 0.01, "square_decay": 0.9}
    optimizer = {"name": "rmsprop_to_sgd", "learning_rate": 0.1, "momentum": 0.9, "transition": transition}
    batch = {"per_rank": 32, "emulated_ranks": 256}
    norm = {"name": "resnet18", "batch_norm": {"span": 64}}
    changes = {"optimizer": optimizer, "batch": batch, "epochs": 30, "model": {**values["model"], **norm}}
    small = smoke(Recipe.model_validate_json(json.dumps({**values, **changes})))
    assert (small.at(2).global_batch, small.at(2).batch.micro_batch) == (16, 4)
    assert small.model.batch_norm.span == "world"
    assert small.optimizer.transition.center == pytest.approx(0.6)
    assert [sgd_share(epoch, small.optimizer.transition) for epoch in (0.9, 1)] == [
        pytest.approx(math.exp(-2.4) / 2),
        1.0,
    ]
    # RMSprop's own rate, whose steps have no size of the gradient in them, stays.
    own = schedule(small.at(2), 16).peak * small.optimizer.transition.rmsprop_rate
    assert own == pytest.approx(0.1 * (32 * 256) / values["schedule"]["base_batch"] * 0.01)


@pytest.mark.parametrize(("span", "expected"), [(32, None), (8, 2), (64, "world"), ("world", "world"), (None, None)])
def test_images_that_share_statistics_stay_fewer_as_many_or_more(span, expected):
    values = RECIPES["mlperf-resnet50@3264"].model_dump(mode="json")
    values["model"]["batch_norm"]["span"], values["batch"]["micro_batch"] = span, 32
    assert smoke(Recipe.model_validate_json(json.dumps(values))).model.batch_norm.span == expected


def test_rates_of_rules_that_adapt_their_steps_follow_the_root_of_the_batch():
    values = RECIPES["mlperf-resnet50@3264"].model_dump(mode="json")
    values["optimizer"] = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}
    small = smoke(Recipe.model_validate_json(json.dumps(values)))
    assert small.optimizer.learning_rate == pytest.approx(0.01 * (16 / 3264) ** 0.5)


def test_a_warm_up_in_steps_stays_its_part_of_the_run():
    small = smoke(RECIPES["mlperf-resnet50@8192"]).schedule
    assert (small.warmup_steps, small.decay_steps) == (None, None)
    assert small.warmup_epochs == pytest.approx(3 * 781.96 / (781.96 + 6095), rel=1e-4)
    file = smoke(RECIPES["you2017-lars@1024-file"]).schedule
    assert (file.warmup_epochs, file.decay_from) == (pytest.approx(3 * 8 / 100), "start")
