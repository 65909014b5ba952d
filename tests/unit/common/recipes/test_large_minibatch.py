"""The study of large batches: its recipe, its result in the repository, and the program that makes it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.data import open_sources
from hpctrain.worker.train.loop import learning_rate

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "benchmarks/large_minibatch.py"
STUDY = json.loads((ROOT / "notebooks/large_minibatch.json").read_text())
TRAIN, TEST = 1024, 773
BASE_RATE, BASE_BATCH = 0.0125, 16


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("large_minibatch", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_minibatch"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["large_minibatch"]


def paper_rate(rule: str, batch: int, epoch: float) -> float:
    """Goyal et al. 2017, sections 2.1, 2.2 and 5.1, for 30 epochs instead of 90."""
    scaled = BASE_RATE if rule == "unscaled" else BASE_RATE * batch / BASE_BATCH
    if epoch < 5 and rule == "gradual":
        return BASE_RATE + (scaled - BASE_RATE) * epoch / 5
    if epoch < 5 and rule == "constant":
        return BASE_RATE
    return scaled / 10 ** sum(epoch >= milestone for milestone in (10, 20, 27))


@pytest.mark.parametrize("rule", ["gradual", "constant", "none", "unscaled"])
@pytest.mark.parametrize("batch", [16, 32, 256, 1024])
def test_the_schedule_is_the_papers(program, rule, batch):
    recipe = program.Case(batch=batch, rule=rule, seed=3).recipe()
    rate, steps = learning_rate(recipe, TRAIN), TRAIN // batch
    expected = [paper_rate(rule, batch, step / steps) for step in range(30 * steps)]
    assert [rate(step) for step in range(30 * steps)] == pytest.approx(expected, rel=1e-12)
    assert recipe.seed == 3


def test_every_batch_divides_the_training_images_and_no_seed_their_choice():
    train, test = open_sources(load_recipe("digits-large-minibatch"))
    assert (len(train), len(test)) == (TRAIN, TEST)
    assert all(TRAIN % batch == 0 for batch in (16, 32, 64, 128, 256, 512, 1024))
    other, _ = open_sources(load_recipe("digits-large-minibatch", ["seed=4"]))
    everything = [np.arange(TRAIN)]
    np.testing.assert_array_equal(next(train.stream(everything, 0)).images, next(other.stream(everything, 0)).images)


def test_the_study_in_the_repository_is_of_this_recipe():
    recipe = load_recipe("digits-large-minibatch")
    said = recipe.model_dump(mode="json", exclude={"source", "reported"}, exclude_defaults=True)
    assert STUDY["recipe"] == said, "benchmarks/large_minibatch.py --out notebooks/large_minibatch.json makes it again"


def test_the_study_in_the_repository_is_whole(program):
    cases = [(run["batch"], run["rule"], run["seed"]) for run in STUDY["runs"]]
    assert cases == list(itertools.product(program.BATCHES, program.RULES, range(5)))
    for run in STUDY["runs"]:
        assert len(run["wrong"]) == 30
        assert run["error"] == pytest.approx(100 * statistics.median(run["wrong"][-5:]) / TEST)


def test_what_the_recipe_reports_is_what_the_study_found(program):
    for row in load_recipe("digits-large-minibatch").reported:
        errors = [run["error"] for run in STUDY["runs"] if (run["batch"], run["rule"]) == (row.batch, "gradual")]
        assert row.metric == "test_accuracy"
        assert row.value == pytest.approx(1 - statistics.mean(errors) / 100, abs=5e-5)
        assert row.deviation == pytest.approx(statistics.stdev(errors) / 100, abs=5e-5)
    assert {row.batch for row in load_recipe("digits-large-minibatch").reported} == set(program.BATCHES)
