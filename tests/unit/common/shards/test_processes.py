"""Shards that several processes make."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.shards.processes import with_processes
from support.refusals import codes, refused
from support.shard_folders import contents
from support.small_imagenet import write_images


def test_any_number_of_processes_makes_the_same_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images", images=200, classes=4, size=40, broken=4)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " * 100)
    text = ("--tokenizer", "bytes", "--validation-share", "0.2", "--part-mb", "0.001")
    for processes in "1", "3":
        shards, tokens = (str(tmp_path / f"{name}-{processes}") for name in ("shards", "tokens"))
        assert main(["data", "shard", str(tmp_path / "images"), shards, "--shard-mb", "0.05", "-np", processes]) == 0
        assert "4 images" in capfd.readouterr().out
        assert main(["data", "prepare-text", str(tmp_path / "texts"), tokens, *text, "-np", processes]) == 0
    for name, pattern in (("shards", "train-*.tar"), ("tokens", "train-*.bin")):
        assert contents(tmp_path / f"{name}-1") == contents(tmp_path / f"{name}-3")
        assert len([*(tmp_path / f"{name}-3").glob(pattern)]) > 2


def test_an_error_of_a_process_is_the_command_s(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images", images=40, classes=2, size=16)
    next((tmp_path / "images" / "train").glob("*/*_1.JPEG")).with_suffix(".txt").touch()
    assert main(["data", "shard", str(tmp_path / "images"), str(tmp_path / "shards"), "-np", "2"]) == 2
    assert codes(capfd.readouterr().err) == ["HT-source-wrong"]


def test_a_killed_process_is_named() -> None:
    with refused("HT-process-killed", count=2):
        with_processes(2, lambda run: list(run(_kill_itself, [1, 2])))


def _kill_itself(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
