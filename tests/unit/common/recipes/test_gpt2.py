"""The recipe of GPT-2: nanoGPT's schedule step by step, and what does not go together with text."""

from __future__ import annotations

import math

import pytest

from hpctrain.common.optim.learning_rate import learning_rate
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.report.recipe_schedule import training_samples
from support.refusals import refused


def get_lr(it: int) -> float:
    """train.py of nanoGPT at 3adf61e1, lines 231 to 242."""
    if it < 2000:
        return 6e-4 * (it + 1) / 2001
    ratio = (it - 2000) / (600000 - 2000)
    return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)


def test_the_rate_is_nanogpts():
    recipe = load_recipe("gpt2-124m").at(8)
    rate = learning_rate(recipe, training_samples(recipe.data))
    assert rate.iterations_per_epoch * rate.epochs == 600_000
    for step in (0, 1, 999, 1999, 2000, 2001, 100_000, 301_000, 599_999, 600_000):
        assert rate(step) == pytest.approx(get_lr(step), rel=1e-10), step


def test_the_batch_is_half_a_million_tokens_on_any_ranks():
    for ranks in (1, 8, 40):
        recipe = load_recipe("gpt2-124m").at(ranks)
        assert recipe.global_batch * recipe.model.context == 491_520
        assert recipe.batch.at_once(ranks) == 12
        assert recipe.batch.parts(480, ranks) == 40 // ranks


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (["data.name=digits"], "HT-keys-not-together", {"key": "the recipe"}),
        (["model.heads=5"], "HT-keys-not-together", {"key": "model"}),
        (["loss=binary_cross_entropy"], "HT-keys-not-together", {"key": "the recipe"}),
        (["model.batch_norm.span=4"], "HT-recipe-key-of-another", {"key": "batch_norm"}),
        (["mixing={name: mixup, alpha: 0.2}"], "HT-file-unknown-key", {"key": "mixing.name"}),
    ],
)
def test_what_does_not_go_with_text_is_refused(overrides, code, values):
    with refused(code, **values):
        load_recipe("gpt2-124m", overrides)


def test_without_a_folder_only_a_small_run_begins():
    recipe = load_recipe("gpt2-124m")
    with refused("HT-recipe-needs-data-path", recipe="gpt2-124m"):
        require_recipe(recipe.at(2), 2)
    require_recipe(smoke(recipe).at(2), 2)


def test_a_small_run_keeps_the_vocabulary_of_a_folder():
    assert smoke(load_recipe("gpt2-124m", ["data.path=there"])).model.vocabulary == 50304
    small = smoke(load_recipe("gpt2-124m"))
    assert (small.model.vocabulary, small.model.layers, small.schedule.warmup_steps) == (320, 4, None)


@pytest.mark.parametrize(
    ("ranks", "overrides", "code", "words"),
    [
        (5, ["mesh={tp: 5}"], "HT-model-not-divisible", "5 ranks cannot share the 12 heads"),
        (13, ["mesh={pp: 13}"], "HT-model-not-divisible", "13 ranks make 13 stages with pipeline.schedule 1f1b"),
        (8, ["mesh={pp: 8}", "pipeline.schedule=interleaved_1f1b"], "HT-model-not-divisible", "8 ranks make 16 stages"),
        (12, ["mesh={tp: 4, pp: 3}"], None, ""),
    ],
)
def test_a_gpt_is_divided_into_no_more_than_it_has(ranks, overrides, code, words):
    recipe = load_recipe("gpt2-124m", ["data.path=there", *overrides]).at(ranks)
    if code is None:
        require_recipe(recipe, ranks)
        return
    with refused(code, words):
        require_recipe(recipe, ranks)
