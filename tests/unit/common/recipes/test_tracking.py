"""``tracking`` in a recipe, and what it is to a run that goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.difference import deciding_differences, differences
from hpctrain.common.recipes.load import load_recipe
from hpctrain.control.resuming.resume import changed_work
from support.refusals import check
from support.report.written_runs import digits, recipe_plan, script_plan


@pytest.mark.parametrize("value", ["[tensorboard, mlfow]", "mlfow", "7", "{mlflow: 1}", "[[mlflow]]"])
def test_what_is_no_tracker(value: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        load_recipe("digits", [f"tracking={value}"])
    check(caught.value, "HT-file-value", where=f"--set tracking={value}")
    assert all(name.startswith("tracking") for name in re.findall(r"tracking[.0-9]*(?=: )", caught.value.message))


def test_who_follows_a_run_is_no_difference_of_it() -> None:
    plain, tracked = digits(), load_recipe("digits", ["tracking=[wandb]"])
    assert not differences(plain, tracked)
    assert not deciding_differences(plain, tracked)
    assert not tracked.reported[0].of_other_values


def test_a_run_goes_on_with_the_trackers_that_are_said_last() -> None:
    begun = recipe_plan(recipe=load_recipe("digits", ["tracking=[mlflow]"]))
    assert changed_work(begun, None)[0].trackers == ("mlflow",)
    assert changed_work(begun, load_recipe("digits"))[0].trackers == ("mlflow",)
    plan, changed = changed_work(begun, load_recipe("digits", ["tracking=[wandb]"]))
    assert (plan.trackers, changed) == (("wandb",), {})
    longer, changed = changed_work(begun, load_recipe("digits", ["epochs=30"]), accept=True)
    assert (longer.trackers, set(changed)) == (("mlflow",), {"epochs"})
    script = script_plan()
    assert script.script is not None
    named = script.script.model_copy(update={"tracking": ("mlflow",), "path": Path("train.py")})
    assert changed_work(script, named)[0].trackers == ("mlflow",)
