"""``recipes show --world`` against the formulas of the papers and of scikit-learn's own division."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hpctrain.cli.main import main
from hpctrain.common.recipes.load import load_recipe
from hpctrain.report.recipe_schedule import at_world, momentum, schedule, training_samples
from support.refusals import refused


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["recipes", "show", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_digits_on_any_world(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "digits", "--world", "4")
    assert (found["global_batch"], found["epochs"], found["iterations_per_epoch"]) == (64, 20, math.ceil(1437 / 64))
    peak = 0.025 * 64 / 32
    cosine = [peak * (1 + math.cos(math.pi * (epoch - 2) / 18)) / 2 for epoch in range(2, 21)]
    assert found["learning_rate"] == pytest.approx([0.025, (0.025 + peak) / 2, *cosine], abs=1e-15)
    assert found["momentum"] == [0.9] * 21
    assert found["source"] == load_recipe("digits").source
    assert [row["value"] for row in found["reported"]] == [0.975]


@pytest.mark.parametrize(("world", "peak"), [(8, 0.1), (256, 3.2), (2048, 25.6)])
def test_goyal(capsys: pytest.CaptureFixture[str], world: int, peak: float) -> None:
    found = shown(capsys, "goyal2017", "--world", str(world))
    assert (found["global_batch"], found["epochs"]) == (32 * world, 90)
    iterations = 1_281_167 / (32 * world)
    assert found["iterations_per_epoch"] in (math.floor(iterations), math.ceil(iterations))
    expected = [0.1 + (peak - 0.1) * epoch / 5 for epoch in range(5)]
    expected += [peak] * 25 + [peak / 10] * 30 + [peak / 100] * 20 + [peak / 1000] * 11
    assert found["learning_rate"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.43, 0.333, 0.5])
def test_digits_are_counted_as_they_are_divided(fraction: float) -> None:
    labels = load_digits().target
    train, _ = train_test_split(np.arange(len(labels)), test_size=fraction, random_state=0, stratify=labels)
    assert training_samples(load_recipe("digits", [f"data.test_fraction={fraction}"]).data) == len(train)


def test_overrides_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "digits", "--world", "2", "--set", "epochs=3", "--set", "batch.size=128")
    assert (found["global_batch"], found["iterations_per_epoch"], len(found["learning_rate"])) == (128, 12, 4)
    with refused("HT-argument-missing", recipe="goyal2017", per_rank=32):
        at_world(load_recipe("goyal2017"), None)
    with refused("HT-batch-too-large", batch=2000, samples=1437):
        schedule(at_world(load_recipe("digits", ["batch.size=2000", "batch.drop_last=true"]), 1))


def test_samples_are_those_of_data_parallel_ranks() -> None:
    sharded = ["mesh.dp_shard=2", "mesh.dp_replicate=1"]
    assert at_world(load_recipe("digits", [*sharded, "batch={per_rank: 8}"]), 2).global_batch == 16
    with refused("HT-ranks-not-divisible", mesh="dp_shard 2", product=2) as caught:
        at_world(load_recipe("digits", sharded), 8)
    assert "8" in str(caught.value.values["problem"])
    # A batch that is the same on any number of ranks needs none.
    assert at_world(load_recipe("digits", sharded), None).global_batch == 64


def test_momentum_of_adam_is_its_first_beta() -> None:
    adam = load_recipe("digits", ["optimizer={name: adam, learning_rate: 0.1, betas: [0.8, 0.95]}"]).optimizer
    assert momentum(adam) == 0.8
