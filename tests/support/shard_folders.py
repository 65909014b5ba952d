"""Folders of shards: made in this process, and read back whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.common.shards.image_shards import open_shards
from hpctrain.common.shards.make import ShardRequest, make_shards
from hpctrain.common.shards.manifest import ShardManifest
from hpctrain.common.shards.resumable import Map


def shard(source: Path, folder: Path, run: Map = map, **options: Any) -> tuple[ShardManifest, list[str]]:
    """The manifest, and what was said meanwhile; 20 images a shard unless ``options`` say otherwise."""
    said: list[str] = []
    request = ShardRequest(source=source, folder=folder, **{"shard_samples": 20, **options})
    return make_shards(request, run, said.append), said


def samples(folder: Path, split: str) -> list[tuple[str, int, bytes]]:
    """Key, label and content of each image, in the order of the shards."""
    shards = open_shards(folder, split)
    try:
        return [(shards.key(row), int(shards.labels[row]), shards.read(row)) for row in range(len(shards))]
    finally:
        shards.close()


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
