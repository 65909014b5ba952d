"""The commands of docs/your-own-data.md, as they are printed, on scikit-learn's digits in folders of PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from hpctrain.common.run.events import read_events
from support.launching import Launch
from support.pages import ROOT, commands_of

_CLASSES = 4
# What makes runs short: the data are few, and these are added to the two commands that train.
_SHORT = ("--set", "epochs=2", "--set", "images.flip=false", "--set", "data.workers=1")


def photos(folder: Path) -> None:
    digits = load_digits()
    for label in range(_CLASSES):
        own = folder / str(label)
        own.mkdir(parents=True)
        for number in np.flatnonzero(digits.target == label)[:50]:
            image = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))
            image.resize((32, 32), Image.Resampling.BICUBIC).save(own / f"{number:04}.png")


def losses(run: Path) -> list[float]:
    return [event.loss for event in read_events(run / "events.jsonl") if event.event == "step"]


@pytest.mark.long
def test_five_commands(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    photos(tmp_path / "photos")
    page = (ROOT / "docs" / "your-own-data.md").read_text()
    printed = [list(each.words) for each in commands_of(page.partition("```\n")[0] + "```\n", "page")]
    assert [words[0] for words in printed] == ["recipes", "data", "run", "recipes", "run"]
    said = []
    for words in printed:
        result = hpctrain(*words, *(_SHORT if words[0] == "run" else ()))
        assert result.returncode == 0, result.stdout
        said.append(result.stdout)
    # 512 weights and a bias for each class on top of resnet18's other layers.
    assert f"{11_176_512 + 513 * _CLASSES:,} parameters" in said[2]
    # The commands that the first one prints are the next two of the page.
    for words in printed[1:3]:
        assert " ".join(["hpctrain", *words[:4]]) in said[0]
    trained, tuned = (losses(tmp_path / name) for name in ("trained", "fine-tuned"))
    assert abs(trained[0] - np.log(_CLASSES)) < 0.3
    # It goes on from what was learned.
    assert np.mean(tuned) < np.mean(trained)
    # What it began with is no longer needed.
    (tmp_path / "trained").rename(tmp_path / "elsewhere")
    result = hpctrain("run", "--resume", "--run-dir", "fine-tuned", "--set", "epochs=3", "--accept-changes")
    assert result.returncode == 0, result.stdout
    assert len(losses(tmp_path / "fine-tuned")) == len(tuned) * 3 // 2
