"""The recipe and the commands of docs/your-own-data.md as they are printed, on scikit-learn's digits as PNG files."""

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
_SIZES = ("batch.size=8", "images.size=32", "images.test_size=32", "images.test_resize=36")
_SHORT = [word for value in ("epochs=2", "images.flip=false", "data.workers=1", *_SIZES) for word in ("--set", value)]


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
def test_three_commands(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    photos(tmp_path / "photos")
    page = (ROOT / "docs" / "your-own-data.md").read_text()
    (tmp_path / "flowers.yaml").write_text(page.partition("```yaml\n")[2].partition("```\n")[0])
    printed = [list(command.words) for command in commands_of(page, "page") if command.whole]
    assert [words[0] for words in printed] == ["data", "run", "run"]
    said = []
    for words in printed:
        result = hpctrain(*words, *(_SHORT if words[0] == "run" else ()))
        assert result.returncode == 0, result.stdout
        said.append(result.stdout)
    # 512 weights and a bias for each class on top of resnet18's other layers.
    assert f"{11_176_512 + 513 * _CLASSES:,} parameters" in said[1]
    trained, tuned = (losses(tmp_path / name) for name in ("trained", "tuned"))
    assert abs(trained[0] - np.log(_CLASSES)) < 0.3
    # It goes on from what was learned.
    assert np.mean(tuned) < np.mean(trained)
    # What it began with is no longer needed.
    (tmp_path / "trained").rename(tmp_path / "elsewhere")
    result = hpctrain("run", "--resume", "--run-dir", "tuned", "--set", "epochs=3", "--accept-changes")
    assert result.returncode == 0, result.stdout
    assert len(losses(tmp_path / "tuned")) == len(tuned) * 3 // 2
