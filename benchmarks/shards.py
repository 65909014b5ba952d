"""Sharding 5,000 images by one process, and by ranks of 1, 2 and 4 hosts: ``python benchmarks/shards.py``.

Each of them makes the shards anew, whole commands in turn; the table has the medians of their times, of which those
from the first shard to the manifest leave out how all begins and lists the source, the ratios to one process, and the
hash over all files of the shards, which is to be one. The hosts are on this machine and share its cores: the ratios
show what several hosts cost, not how fast they are. Needs root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Where the hosts are made.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.hosts import local_hosts
from support.hosts.local_hosts import LocalHosts, Settings
from support.launching import AS_ROOT
from support.small_imagenet import write_images

_LIMIT_SECONDS = 600.0
_HOSTS = {1: "one host", 2: "two hosts, a rank each", 4: "four hosts, a rank each"}
_ALONE = "one process"
_CLASSES = 10
_BROKEN = 4


class Measurement:
    """The ways to make the shards of a folder of images."""

    def __init__(self, folder: Path, hosts: LocalHosts, shard_mb: float) -> None:
        self._folder = folder
        self._hosts = hosts
        self._command = ("data", "shard", str(folder / "images"), str(folder / "shards"), "--shard-mb", str(shard_mb))
        self.ways: dict[str, Callable[[], object]] = {
            _ALONE: self._alone,
            **{title: self._on_hosts(number) for number, title in _HOSTS.items()},
        }

    def _alone(self) -> None:
        subprocess.run([sys.executable, "-m", "hpctrain", *self._command], check=True, timeout=_LIMIT_SECONDS)

    def _on_hosts(self, number: int) -> Callable[[], object]:
        names = ",".join(f"{name}:1" for name in self._hosts.names[:number])
        command = ("hpctrain", *self._command, "-H", names)
        return lambda: self._hosts.run("h1", *command, cwd=self._folder, timeout=_LIMIT_SECONDS)

    def shards(self) -> list[Path]:
        """Those that are there."""
        return list((self._folder / "shards").glob("*.tar"))


def digest(folder: Path) -> str:
    """Of the names and contents of all files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


class Result:
    """Of one way: seconds of whole commands, those from the first shard to the manifest, and hashes."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.making: list[float] = []
        self.hashes: set[str] = set()


def measure(measurement: Measurement, folder: Path, rounds: int) -> dict[str, Result]:
    """The results of each way."""
    results = {name: Result() for name in measurement.ways}
    for _ in range(rounds):
        for name, way in measurement.ways.items():
            begin = time.monotonic()
            way()
            result = results[name]
            result.whole.append(time.monotonic() - begin)
            first = min(path.stat().st_mtime for path in measurement.shards())
            result.making.append((folder / "shards" / "manifest.json").stat().st_mtime - first)
            result.hashes.add(digest(folder / "shards"))
            shutil.rmtree(folder / "shards")
            print(f"{name}: {result.whole[-1]:.1f} s", file=sys.stderr)
    return results


def table(results: Mapping[str, Result], images: int, title: str) -> Table:
    """A row for each way."""
    titles = ("by", "seconds", "ratio", "from the first shard", "ratio", "images/s", "SHA-256")
    found = Table(*titles, title=title)
    whole, making = (
        {name: statistics.median(getattr(result, kind)) for name, result in results.items()}
        for kind in ("whole", "making")
    )
    for name, result in results.items():
        found.add_row(
            name,
            f"{whole[name]:.1f}",
            f"{whole[name] / whole[_ALONE]:.2f}",
            f"{making[name]:.1f}",
            f"{making[name] / making[_ALONE]:.2f}",
            f"{images / making[name]:.0f}",
            ", ".join(each[:12] for each in sorted(result.hashes)),
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--size", type=int, default=500, help="pixels of the longer side of most images")
    parser.add_argument("--shard-mb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="the medians are shown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := local_hosts.obstacle():
        parser.error(reason)
    with tempfile.TemporaryDirectory(prefix="hpctrain-shards-") as name:
        folder = Path(name)
        sizes = {"images": options.images, "size": options.size}
        write_images(folder / "images", classes=_CLASSES, broken=_BROKEN, **sizes)
        place = folder.parent / f"hpctrain-hosts-{secrets.token_hex(4)}"
        shared = [folder, Path(__file__).parents[1], Path(sys.prefix).resolve()]
        variables = {"PYTHONPATH": str(Path(__file__).parents[1]), **AS_ROOT}
        with LocalHosts(place, Settings(), shared=shared, variables=variables) as hosts:
            results = measure(Measurement(folder, hosts, options.shard_mb), folder, options.rounds)
    title = f"{options.images} images of {options.size} pixels; load {os.getloadavg()[0]:.1f}"
    Console(width=120).print(table(results, options.images, title))
    if options.json:
        found = {name: vars(result) | {"hashes": sorted(result.hashes)} for name, result in results.items()}
        options.json.write_text(json.dumps({"load": os.getloadavg()[0], "rows": found}, indent=2) + "\n")
    return 0 if len(set.union(*(result.hashes for result in results.values()))) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
