"""The speed of recipes on a GPU, as ratios to plain compiled PyTorch on the same network in the same process.

On a machine without a GPU at toy sizes, whose figures mean nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.control.predict.transformers.language_training import recipe_language_training
from hpctrain.control.predict.transformers.rank_memory import memory
from support.gpu_runs import CARD, GPUS, launch, of_make_gpu, shards_of_photographs, speed

pytestmark = of_make_gpu

_IMAGES = ("data.path=/none", "precision=bf16", "compile=on")
_TOY_IMAGES = ("model.name=resnet18", "images.size=32")
_TOY_TEXT = ("model.layers=2", "model.width=64", "model.heads=2", "model.context=32", "model.vocabulary=512")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return shards_of_photographs(tmp_path_factory.mktemp("photographs"), 2200 if GPUS else 110)


@pytest.mark.parametrize("name", ["goyal2017", "you2017-lars@256", "lamb"])
def test_images(tmp_path, note, shards, name):
    """ResNet-50, 256 images in bfloat16: the step by itself, and the whole run from JPEG shards."""
    batch = 256 if GPUS else 8
    size = "per_rank" if name == "goyal2017" else "size"
    # On a CPU, to compile the kinds of a network's blocks would take minutes; those of a GPT are one.
    small = () if GPUS else (*_TOY_IMAGES, "compile=off")
    changes = (*_IMAGES, f"batch.{size}={batch}", f"batch.micro_batch={batch}", *small)
    rates = speed(tmp_path, note, name, *changes)
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    whole = [f"data.path={shards}", *changes[1:], f"data.workers={workers}", f"epochs={8 if GPUS else 1}"]
    if name == "goyal2017":
        # Its rate falls after 30 epochs, which such a run does not have.
        whole += ["schedule.milestones=[0.5]", "schedule.warmup_epochs=0"]
    settings = [word for each in whole for word in ("--set", each)]
    start = ("run", name, "--framework", "torch", "-np", "1", *settings, "--run-dir", "run", "--tracking", "none")
    launch(tmp_path, *start, seconds=120, **CARD)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rate = summary["samples_per_s"]
    note(from_shards=rate, workers=workers, data_share=summary["data_share"])
    if rate:
        note(from_shards_to_plain=rate / rates["plain"])


@pytest.mark.parametrize("micro_batch", [12, 48])
def test_text(tmp_path, note, micro_batch):
    """gpt2-124m with so many windows of 1,024 tokens at once, of a batch of 96."""
    size, small = (96, ()) if GPUS else (micro_batch, _TOY_TEXT)
    changes = ("data.path=/none", "compile=on", f"batch.size={size}", f"batch.micro_batch={micro_batch}", *small)
    training = recipe_language_training(load_recipe("gpt2-124m", changes))
    layout, _ = training.trained(training.layout(1))
    note(predicted_bytes=memory(training.network, layout, sequence=training.sequence).allocated)
    speed(tmp_path, note, "gpt2-124m", *changes)
