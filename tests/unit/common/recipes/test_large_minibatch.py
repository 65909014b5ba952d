"""The study of large batches: its recipe, its result in the repository, and the program that makes it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.data import open_sources
from hpctrain.worker.train.loop import learning_rate
from support import needs
from support.startup import warm_start

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


def plain_training(batch: int, seed: int, rates: list[float]) -> list[int]:
    """The same training without hpctrain's loop; returns the wrong test images after each epoch."""
    import torch
    from torch.nn import functional as F

    from hpctrain.worker.models.torch_digits import digits_cnn

    train, test = open_sources(load_recipe("digits-large-minibatch"))
    torch.manual_seed(seed)
    model = digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=1e-4)
    inputs, labels = (torch.from_numpy(each) for each in (train.samples.images, train.samples.labels))
    wrong, steps = [], TRAIN // batch
    for step, rate in enumerate(rates):
        epoch, part = divmod(step, steps)
        order = np.random.default_rng((seed, epoch)).permutation(TRAIN)[part * batch : (part + 1) * batch]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[order].movedim(-1, 1)), labels[order]).backward()
        optimizer.step()
        if part == steps - 1:
            with torch.no_grad():
                found = model(torch.from_numpy(test.samples.images).movedim(-1, 1)).argmax(dim=1).numpy()
            wrong.append(int((found != test.samples.labels).sum()))
    return wrong


@pytest.mark.thorough
@needs.pytorch
def test_a_study_of_two_runs(tmp_path, program, capsys):
    """It trains as a plain loop with the paper's rates does, and what it writes can be read and drawn."""
    out, plot = tmp_path / "study.json", tmp_path / "study.png"
    # A rate at which the last bits of a sum do not decide what comes of them.
    shorter = ("epochs=3", "schedule.milestones=[2]", "schedule.warmup_epochs=1", "optimizer.learning_rate=0.001")
    settings = itertools.chain.from_iterable(("--set", setting) for setting in shorter)
    cases = ("--batches", "512", "--rules", "gradual", "none", "--seeds", "1", "--processes", "1")
    command = (sys.executable, PROGRAM, *settings, *cases, "--out", out)
    # Begun cold: the processes of its pool look for the main module of an interpreter of its own.
    cold = {name: value for name, value in os.environ.items() if name != warm_start.DIRECTORY}
    made = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=cold).stdout
    assert "no warm-up" in made and "seed 0" in made
    runs = {run["rule"]: run for run in json.loads(out.read_text())["runs"]}
    behind = [0.032, 0.032, 0.0032, 0.0032]
    for rule, rates in (("none", [0.032, 0.032, *behind]), ("gradual", [0.001, 0.0165, *behind])):
        assert runs[rule]["wrong"] == pytest.approx(plain_training(512, 0, rates), abs=3)
    assert runs["none"]["wrong"] != pytest.approx(runs["gradual"]["wrong"], abs=6)
    program.main(["--read", str(out), "--plot", str(plot)])
    assert f"{runs['none']['error']:.2f} ± 0.00" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
