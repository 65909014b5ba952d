"""Runs of two ranks whose photographs are in object storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from support.interrupted_runs import assert_same_bits
from support.launching import Launch

if TYPE_CHECKING:
    from support.s3_server import S3Server

_SMALL = ("images.size=32", "images.test_resize=37", "images.test_size=32", "model.name=resnet18", "data.workers=1")
# Of 30 photographs to train on in tens of shards, and those for validation.
_SHARDS, _OBJECTS = 16, 18


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    write_folders(folder / "files", photographs(30))
    write_shards(folder / "shards", folder / "files", 2)
    return folder / "shards"


@pytest.fixture
def server(disk: Path) -> Iterator[S3Server]:
    pytest.importorskip("torch")
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from support.s3_server import s3_server

    with s3_server() as server:
        server.put(disk)
        yield server


def options(place: Path | str) -> list[str]:
    words = [word for setting in (f"data.path={place}", "epochs=2", *_SMALL) for word in ("--set", setting)]
    return ["you2017-lars", "--smoke", "-np", "2", "--framework", "torch", *words]


@pytest.mark.thorough
def test_a_run_from_a_server_that_fails_equals_one_from_disk(
    hpctrain: Launch, tmp_path: Path, disk: Path, server: S3Server
) -> None:
    """Every tenth request fails, in three ways by turns; the second epoch asks for nothing."""
    whole = hpctrain("run", *options(disk), "--run-dir", "disk")
    assert whole.returncode == 0, whole.stdout
    kinds = ("503", "cut", "changed")
    server.fault = lambda name, number: kinds[number // 10 % 3] if number % 10 == 0 else None
    environment = {**server.environment, "HPCTRAIN_CACHE": str(tmp_path / "cache")}
    remote = hpctrain("run", *options(server.url), "--run-dir", "remote", **environment)
    assert remote.returncode == 0, remote.stdout
    assert_same_bits(tmp_path / "remote", tmp_path / "disk")
    assert server.failed >= 1
    assert len(server.gets) == _OBJECTS + 1
    assert server.requests == _OBJECTS + 1 + server.failed
    told = [path for path in (tmp_path / "remote").rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
    assert told == [] and "hush" not in remote.stdout
