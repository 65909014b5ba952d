"""Published recipes, made small, end to end on a small ImageNet: trained, stopped, resumed, reported."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.events import read_events
from hpctrain.common.shards.make import ShardRequest, make_shards
from support.interrupted_runs import assert_same_bits, interrupted
from support.launching import Launch
from support.small_imagenet import write_images


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 images to train on, without two that are broken, and 11 for validation."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_images(folder / "images", images=110, classes=4, size=80, broken=2)
    make_shards(ShardRequest(source=folder / "images", folder=folder / "shards", shard_bytes=1 << 26), map, print)
    return folder / "shards"


def options(shards: Path, *overrides: str) -> list[str]:
    # A quarter of a smoke run's pixels.
    small = ("images.size=32", "images.test_resize=37", "images.test_size=32")
    settings = (f"data.path={shards}", "data.workers=1", *small, *overrides)
    return ["--smoke", "-np", "2", *(word for setting in settings for word in ("--set", setting))]


def of_kind(run: Path, kind: str) -> list[Any]:
    return [event for event in read_events(run / "events.jsonl") if event.event == kind]


def assert_learned(run: Path) -> None:
    losses = [epoch.train_loss for epoch in of_kind(run, "epoch")]
    assert losses[-1] < 0.95 * losses[0], losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "recipe"), [("torch", "goyal2017"), pytest.param("keras", "you2017-lars", marks=pytest.mark.thorough)]
)
def test_learns_is_reported_stopped_and_resumed_to_the_same_bits(
    hpctrain: Launch, tmp_path: Path, shards: Path, framework: str, recipe: str
) -> None:
    """Batch statistics and the loader's random numbers included."""
    pytest.importorskip(framework)
    arguments = [recipe, *options(shards, "model.name=resnet18"), "--framework", framework]
    whole = hpctrain("run", *arguments, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stdout
    assert_learned(tmp_path / "whole")
    assert main(["report", str(tmp_path / "whole")]) == 0

    def interrupt(launcher: int) -> None:
        if framework == "torch":
            os.kill(launcher, signal.SIGUSR1)
        else:
            # As ``hpctrain cancel`` or another host asks for it.
            (tmp_path / "run" / "stop").write_text("the time is over\n")

    status, output = interrupted(tmp_path, 2, arguments, interrupt)
    assert status == 4, output
    said = (
        "interrupted by SIGUSR1; all ranks saved their state and left" if framework == "torch" else "the time is over"
    )
    assert said in output
    last = hpctrain("run", "--resume", "--run-dir", "run")
    assert last.returncode == 0, last.stdout
    assert_same_bits(tmp_path / "run", tmp_path / "whole")
