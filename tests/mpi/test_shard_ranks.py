"""``hpctrain data shard`` on real ranks: the same bytes on any number of them, also where they were killed half-way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.common.shards.image_shards import open_shards
from support.launching import Launch
from support.shard_folders import contents
from support.small_imagenet import write_images

_SHARD = ("--shard-mb", "0.1", "--seed", "5")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imagenet")
    write_images(folder, images=2000, classes=10, size=40, broken=4)
    return folder


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes."""
    folder = tmp_path_factory.mktemp("alone") / "shards"
    command = [str(Path(sys.executable).parent / "hpctrain"), "data", "shard", str(source), str(folder), *_SHARD]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_any_number_of_ranks_makes_the_same_bytes(
    ranks: int, source: Path, alone: Path, hpctrain: Launch, tmp_path: Path
):
    result = hpctrain("data", "shard", str(source), "shards", "-np", str(ranks), *_SHARD)
    assert result.returncode == 0, result.stdout
    assert "4 images" in result.stdout
    assert contents(tmp_path / "shards") == contents(alone)
    assert len(open_shards(tmp_path / "shards", "train")) == 1800
    assert len(open_shards(tmp_path / "shards", "val")) == 200
    assert len(list(alone.glob("train-*.tar"))) > 20


def test_ranks_make_the_same_tokens(hpctrain: Launch, tmp_path: Path):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " * 100)
    text = ("--tokenizer", "bytes", "--validation-share", "0.2", "--part-mb", "0.001")
    for name, further in (("alone", ()), ("tokens", ("-np", "2"))):
        result = hpctrain("data", "prepare-text", "texts", name, *text, *further)
        assert result.returncode == 0, result.stdout
    assert contents(tmp_path / "tokens") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "tokens").glob("train-*.bin"))) > 2
