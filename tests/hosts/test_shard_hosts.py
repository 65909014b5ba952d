"""Shards that ranks of several hosts make: the same bytes as of one process."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.cli.main import main
from hpctrain.common.shards.fake import FakeSet, make_fake
from support.launching import Launch


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_ranks_of_four_hosts_make_the_same_bytes(hosts_hpctrain: Launch, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_fake(source, FakeSet(images=300, classes=5, seed=0, size=40, broken=4))
    shard = ("--shard-mb", "0.02", "--seed", "3")
    assert main(["data", "shard", str(source), str(tmp_path / "alone"), *shard]) == 0
    result = hosts_hpctrain("data", "shard", str(source), "shards", "-H", "h1:1,h2:1,h3:1,h4:1", *shard)
    assert result.returncode == 0, result.stdout
    assert re.search("^.*4 images .*decoded", result.stdout, re.MULTILINE)
    assert contents(tmp_path / "shards") == contents(tmp_path / "alone")
