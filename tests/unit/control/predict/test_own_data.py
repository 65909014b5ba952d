"""Predictions and plans of data of one's own: classes and images are the shards', or what is assumed is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.control.planning.mesh_plan import parameters
from hpctrain.control.predict.network import Hardware
from hpctrain.control.predict.prediction_request import PredictionRequest, predict_request, training_of
from hpctrain.control.predict.training import images, recipe_training

MANIFEST = {
    "classes": ["cat", "cow", "dog", "emu"],
    "splits": {
        split: {
            "samples": samples,
            "bytes": 10,
            "index_sha256": "0",
            "shards": [{"name": f"{split}-000000.tar", "samples": samples, "bytes": 10, "sha256": "0"}],
        }
        for split, samples in (("train", 60), ("val", 20))
    },
    "broken": [],
    "settings": {"source": "/photos", "listing": "0", "seed": 0, "shard_bytes": 10, "shard_samples": None},
}


def recipe(*overrides: str) -> Recipe:
    return load_recipe("goyal2017", ["model.name=resnet18", *overrides])


def test_shards_at_hand_decide(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    own = recipe(f"data.path={tmp_path}")
    training = recipe_training(own)
    # 512 weights and a bias for each class, and 11,176,512 in the other layers, as torchvision's resnet18 has.
    assert training.workload.parameters == training.largest.parameters == parameters(own) == 11_176_512 + 4 * 513
    assert images(own, training.shards) == (60, 20)
    assert training.assumptions == []
    more = recipe(f"data.path={tmp_path}", "model.classes=7")
    assert recipe_training(more).workload.parameters == parameters(more) == 11_176_512 + 7 * 513


def test_what_is_assumed_is_said(tmp_path: Path) -> None:
    elsewhere = recipe(f"data.path={tmp_path / 'on the cluster'}")
    training = recipe_training(elsewhere)
    assert training.workload.parameters == parameters(elsewhere) == 11_689_512
    assert len(training.assumptions) == 1
    # A published recipe is of ImageNet; one that names no source is of anything.
    assert recipe_training(recipe()).assumptions == []
    assert len(recipe_training(recipe("source=''")).assumptions) == 1


@pytest.mark.parametrize(("name", "frozen"), [("goyal2017", "layer1"), ("gpt2-124m", "transformer.h.0")])
def test_that_frozen_parameters_are_predicted_as_trained_is_said(name: str, frozen: str) -> None:
    request = PredictionRequest(hardware=Hardware(gpu="h100-sxm", gpus_per_node=8), nodes=[1])
    said = [
        [
            text
            for text in predict_request(training_of(load_recipe(name, overrides)), request).warnings
            if "model.frozen" in text
        ]
        for overrides in ([], [f"model.frozen=[{frozen}]"])
    ]
    assert [len(each) for each in said] == [0, 1]
