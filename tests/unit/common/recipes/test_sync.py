"""A recipe's ``sync``: what is taken, shown and refused, before anything starts."""

from __future__ import annotations

import json

import pytest

from hpctrain.common.recipes.difference import deciding_differences
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from support.digits_recipes import digits_recipe
from support.refusals import invalid, refused

DILOCO = {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["sync.every=8"], {"mode": "local", "every": 8, "after_epochs": 0.0, "outer": {"optimizer": "none"}}),
        (
            ["sync.every=20", "sync.outer.optimizer=nesterov"],
            {"mode": "local", "every": 20, "after_epochs": 0.0, "outer": DILOCO},
        ),
        (["sync.mode=async"], {"mode": "async", "every": 1, "rule": "downpour", "staleness": 8}),
        (["sync.every=3", "sync.mode=async"], {"mode": "async", "every": 3, "rule": "downpour", "staleness": 8}),
        (
            ["sync={mode: async, rule: easgd, every: 4, staleness: 2}"],
            {"mode": "async", "every": 4, "rule": "easgd", "moving_rate": 0.9, "staleness": 2},
        ),
    ],
)
def test_shows_the_keys_that_are_used_and_reads_them_again(given: list[str], shown: dict[str, object]) -> None:
    recipe = load_recipe("digits", given)
    values = used_values(recipe)
    assert values["sync"] == shown
    assert Recipe.model_validate_json(json.dumps(values)) == recipe
    assert deciding_differences(load_recipe("digits"), recipe)


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ("sync.mode=loose", "HT-file-value", {"key": "sync.mode"}),
        (
            "sync={mode: async, after_epochs: 2}",
            "HT-recipe-key-of-another",
            {"key": "after_epochs", "owners": "local", "name": "async"},
        ),
        (
            "sync={mode: async, moving_rate: 0.5}",
            "HT-recipe-key-of-another",
            {"key": "moving_rate", "owners": "easgd", "name": "downpour"},
        ),
        (
            "sync={every: 2, outer: {momentum: 0.5}}",
            "HT-recipe-key-of-another",
            {"key": "momentum", "owners": "nesterov", "name": "none"},
        ),
    ],
)
def test_wrong_values(given: str, code: str, values: dict[str, str]) -> None:
    with refused(code, **values):
        load_recipe("digits", [given])


@pytest.mark.parametrize(
    ("others", "code"),
    [
        ({"fault_tolerance": {"lost_rank": "shrink"}}, "HT-keys-not-together"),
        ({"communication": {"compression": "bf16"}}, "HT-keys-not-together"),
        ({"mesh": {"dp_shard": 2}}, "HT-keys-not-together"),
        ({"averaging": {"decay": 0.9}}, "HT-keys-not-together"),
        ({"precision": "fp16"}, "HT-keys-not-together"),
        ({"numbers": {"non_finite": "skip"}}, "HT-keys-not-together"),
        (
            {"model": {"name": "resnet18", "batch_norm": {"span": "world"}}, "data": {"name": "imagenet"}},
            "HT-keys-not-together",
        ),
    ],
)
def test_what_cannot_be_combined_says_why(others: dict[str, object], code: str) -> None:
    digits_recipe(**others)
    for sync in ({"every": 4}, {"mode": "async"}):
        with invalid(code):
            digits_recipe(sync=sync, **others)


def test_asynchronous_ranks_meet_at_the_end_of_an_epoch_only() -> None:
    assert digits_recipe(sync={"every": 4}, checkpoints={"every_steps": 5}).sync
    with invalid("HT-keys-not-together"):
        digits_recipe(sync={"mode": "async"}, checkpoints={"every_steps": 5})
