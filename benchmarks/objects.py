"""How long an epoch of photographs takes from disk, first from a server of S3, and then from the node's cache.

``python benchmarks/objects.py`` makes photographs like ImageNet's, puts their shards into moto's server on the
loopback, and lets hpctrain's loader go through them; a rank alone, nothing is trained. In each round the three have
their turns, with an empty cache at its beginning. Workers have started before a time is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from hpctrain.worker.data import open_sources

_URL = "s3://benchmark/shards"
_BATCH = 64
_START_SECONDS = 60.0


@contextlib.contextmanager
def server() -> Iterator[None]:
    """moto's server, with its address in the environment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any"),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def recipe(place: str, workers: int) -> Recipe:
    """The digits' recipe made one of photographs."""
    digits = load_recipe("digits")
    return digits.model_copy(
        update={
            "data": digits.data.model_copy(update={"name": "imagenet", "workers": workers, "path": place}),
            "model": digits.model.model_copy(update={"name": "resnet50"}),
        }
    )


def epochs(place: str, workers: int, count: int) -> list[float]:
    """The seconds that each of so many epochs takes."""
    train, test = open_sources(recipe(place, workers))
    seconds = []
    with contextlib.closing(train), contextlib.closing(test):
        for _ in test.stream([np.arange(len(test))], 0):
            pass
        for epoch in range(count):
            order = np.random.default_rng(epoch).permutation(len(train))
            begin = time.perf_counter()
            for _ in train.stream(np.array_split(order, -(-len(train) // _BATCH)), epoch):
                pass
            seconds.append(time.perf_counter() - begin)
    return seconds


def measure(folder: Path, workers: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each kind of epoch in each round."""
    taken: dict[str, list[float]] = {"disk": [], "server": [], "cache": []}
    for number in range(rounds):
        os.environ["HPCTRAIN_CACHE"] = str(folder / f"cache-{number}")
        # The first one of the disk brings its files into memory, where the cache's are when they have just come.
        taken["disk"].append(epochs(str(folder / "shards"), workers, 2)[1])
        first, second = epochs(_URL, workers, 2)
        taken["server"].append(first)
        taken["cache"].append(second)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--shard-samples", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpctrain-objects-") as name, server():
        folder = Path(name)
        write_folders(folder / "files", photographs(given.images))
        write_shards(folder / "shards", folder / "files", given.shard_samples)
        storage = fsspec.filesystem("s3")
        storage.mkdir("benchmark")
        for path in sorted(folder.joinpath("shards").glob("*.*")):
            storage.put_file(str(path), f"{_URL}/{path.name}")
        taken = measure(folder, given.workers, given.rounds)
        size = sum(path.stat().st_size for path in folder.joinpath("shards").glob("train-*.tar"))
    median = {kind: statistics.median(seconds) for kind, seconds in taken.items()}
    if given.json:
        sys.stdout.write(json.dumps({"seconds": taken, "bytes": size}) + "\n")
        return
    for kind, seconds in median.items():
        ratio = seconds / median["disk"]
        sys.stdout.write(f"{kind:8}{seconds:8.2f} s{ratio:8.2f} of disk   {size / seconds / 1e6:8.0f} MB/s\n")


if __name__ == "__main__":
    main()
