"""The small set in ImageNet's structure, read as torchvision reads the real one."""

from __future__ import annotations

import io
import os
import signal
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat

from hpctrain.cli.main import main
from hpctrain.common.shards import fake
from hpctrain.common.shards.fake import FakeSet, make_fake
from support.refusals import codes, refused

_SET = FakeSet(images=300, classes=5, seed=3, size=48, broken=3)
_ARCHIVES = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    make_fake(folder, _SET)
    return folder


def _train(folder: Path) -> list[tuple[str, bytes]]:
    """Class and content of each training image."""
    found = []
    with tarfile.open(folder / _ARCHIVES[0]) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                for image in inner:
                    assert image.name.startswith(f"{member.name.removesuffix('.tar')}_")
                    assert image.name.endswith(".JPEG")
                    found.append((member.name.removesuffix(".tar"), inner.extractfile(image).read()))
    return found


def _validation(folder: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(folder / _ARCHIVES[2]) as kit:
        meta = loadmat(io.BytesIO(kit.extractfile("ILSVRC2012_devkit_t12/data/meta.mat").read()), squeeze_me=True)[
            "synsets"
        ]
        truth = kit.extractfile("ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt").read().split()
    # The columns as torchvision/datasets/imagenet.py takes them: number, WordNet identifier, and children the fifth.
    wnid_of = {row[0]: row[1] for row in meta if row[4] == 0}
    with tarfile.open(folder / _ARCHIVES[1]) as tar:
        names = sorted(tar.getnames())
        assert names == [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, len(names) + 1)]
        contents = [tar.extractfile(name).read() for name in names]
    return [(wnid_of[int(line)], content) for line, content in zip(truth, contents, strict=True)]


def _opened(content: bytes) -> Image.Image | None:
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except OSError:
        return None
    return image


@pytest.mark.slow
def test_counts_and_what_is_odd(folder: Path):
    train = _train(folder)
    assert Counter(wnid for wnid, _ in train) == dict.fromkeys(_SET.wnids, 54)
    assert Counter(wnid for wnid, _ in _validation(folder)) == dict.fromkeys(_SET.wnids, 6)
    images = [_opened(content) for _, content in train]
    kinds = Counter((image.format, image.mode) if image else None for image in images)
    assert kinds[None] == 3
    assert kinds[("JPEG", "CMYK")] == 3
    assert kinds[("PNG", "RGB")] == 1
    assert kinds[("JPEG", "L")] == 5
    assert kinds[("JPEG", "RGB")] == 270 - 12
    sizes = {image.size for image in images if image}
    assert len(sizes) > 20
    assert np.median([max(size) for size in sizes]) == pytest.approx(48, abs=14)


def test_the_seed_decides_every_byte(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_fake(tmp_path / name, FakeSet(images=40, classes=2, seed=seed, size=16, broken=1))
    for archive in _ARCHIVES:
        contents = [(tmp_path / name / archive).read_bytes() for name in "abc"]
        assert contents[0] == contents[1]
        assert contents[0] != contents[2]


def test_a_killed_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake, "encode", _killed)
    with refused("HT-process-killed"):
        make_fake(tmp_path / "new", FakeSet(images=40, classes=2, seed=1, size=16, broken=1))
    assert not list((tmp_path / "new").iterdir())


def _killed(image: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def test_misuse(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "fake", str(tmp_path / "new"), "--images", "90", "--classes", "10"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-fake-wrong"]
    assert main(["data", "fake", str(tmp_path / "new"), "--images", "100", "--broken", "46"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-fake-wrong"]
    assert not (tmp_path / "new").exists()
    with refused("HT-fake-wrong", f"{folder / _ARCHIVES[0]} is there already"):
        make_fake(folder, _SET)
