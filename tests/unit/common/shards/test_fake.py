"""The small set with ImageNet's irregularities."""

from __future__ import annotations

import io
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.cli.main import main
from hpctrain.common.shards import fake
from hpctrain.common.shards.fake import FakeSet, make_fake
from support.refusals import codes, refused
from support.shard_folders import contents

_SET = FakeSet(images=300, classes=5, seed=3, size=48, broken=3)


def _opened(content: bytes) -> Image.Image | None:
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except OSError:
        return None
    return image


def test_counts_and_what_is_odd(tmp_path: Path):
    make_fake(tmp_path, _SET)
    for split, count in (("train", 54), ("val", 6)):
        assert [len([*folder.iterdir()]) for folder in (tmp_path / split).iterdir()] == [count] * 5
    images = [_opened(path.read_bytes()) for path in (tmp_path / "train").rglob("*.JPEG")]
    kinds = Counter((image.format, image.mode) if image else None for image in images)
    assert kinds == {
        None: 3, ("JPEG", "CMYK"): 3, ("PNG", "RGB"): 1, ("JPEG", "L"): 5, ("JPEG", "RGB"): 270 - 12
    }  # fmt: skip
    sizes = {image.size for image in images if image}
    assert len(sizes) > 20
    assert np.median([max(size) for size in sizes]) == pytest.approx(48, abs=14)
    with refused("HT-output-exists", folder=tmp_path):
        make_fake(tmp_path, _SET)


def test_the_seed_decides_every_byte(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_fake(tmp_path / name, FakeSet(images=40, classes=2, seed=seed, size=16, broken=1))
    one, same, other = (contents(tmp_path / name) for name in "abc")
    assert one == same
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values())


def test_a_killed_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake, "encode", _killed)
    with refused("HT-process-killed"):
        make_fake(tmp_path, FakeSet(images=40, classes=2, seed=1, size=16, broken=1))


def _killed(image: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for options in (("--images", "90", "--classes", "10"), ("--images", "100", "--broken", "46")):
        assert main(["data", "fake", str(tmp_path / "new"), *options]) == 2
        assert codes(capsys.readouterr().err) == ["HT-fake-wrong"]
    assert not (tmp_path / "new").exists()
