"""Shards and tokens by a real cluster of Spark: the same bytes as of one process, also with a killed executor."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.cli.main import main
from hpctrain.common.shards.fake import FakeSet, make_fake
from support import local_spark
from support.local_spark import LocalSpark

pytestmark = pytest.mark.slow

SHARD = ("--shard-mb", "0.05", "--seed", "3")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def spark() -> Iterator[LocalSpark]:
    if reason := local_spark.obstacle():
        pytest.skip(reason)
    with LocalSpark() as cluster:
        yield cluster


@pytest.fixture
def start(spark: LocalSpark, tmp_path: Path) -> Iterator[Start]:
    """``start(program, argument, …)``: Python with the cluster in Spark's configuration."""
    drivers: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, *arguments]
        environment = {**os.environ, **spark.environment}
        drivers.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
            )
        )
        return drivers[-1]

    yield start
    for driver in drivers:
        # Its JVM leaves with it.
        if driver.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]:
                    process.kill()
        driver.communicate(timeout=100)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.thorough
def test_an_executor_is_killed(spark: LocalSpark, start: Start, tmp_path: Path) -> None:
    make_fake(tmp_path / "source", FakeSet(images=1500, classes=5, seed=0, size=40, broken=4))
    assert main(["data", "shard", str(tmp_path / "source"), str(tmp_path / "alone"), *SHARD]) == 0
    driver = start("-m", "hpctrain", "data", "shard", "source", "shards", *SHARD, "--engine", "spark")
    out = tmp_path / "shards"
    until = time.monotonic() + 120
    while len(list(out.glob("train-*.tar"))) < 3:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < until, "no shards were made"
        time.sleep(0.005)
    # The other may not have begun yet.
    executor = spark.executors()[0]
    for process in [*executor.children(recursive=True), executor]:
        process.kill()
    made = len(list(out.glob("train-*.tar")))
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output
    assert made < len(list((tmp_path / "alone").glob("train-*.tar")))
    assert "Lost executor" in output
    assert "4 images cannot be decoded" in output
    assert contents(out) == contents(tmp_path / "alone")


# In one process, whose JVM takes seconds to start.
PROGRAM = r"""
import os, sys
from pathlib import Path
from hpctrain.cli.main import main

text = ["--tokenizer", "bytes", "--validation-share", "0.2", "--part-mb", "0.005", "--engine", "spark"]
assert main(["data", "prepare-text", "texts", "tokens", *text]) == 0

with open("texts/7.jsonl", "a") as file:
    file.write("\nno object\n")
assert main(["data", "prepare-text", "texts", "other", *text]) == 2

from pyspark import SparkContext
SparkContext._jvm.System.setProperty("spark.executor.memory", "8g")
os.environ["HPCTRAIN_TIMEOUT"] = "3"
assert main(["data", "prepare-text", "texts", "none", *text]) == 1
"""


@pytest.mark.thorough
def test_tokens_and_what_is_wrong(spark: LocalSpark, start: Start, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        lines = [json.dumps({"text": f"document {number} {line} " * 9}) for line in range(20)]
        (tmp_path / "texts" / f"{number}.jsonl").write_text("\n".join(lines))
    text = ("--tokenizer", "bytes", "--validation-share", "0.2", "--part-mb", "0.005")
    assert main(["data", "prepare-text", str(tmp_path / "texts"), str(tmp_path / "alone"), *text]) == 0
    output, _ = (driver := start("-c", PROGRAM)).communicate(timeout=120)
    assert driver.returncode == 0, output
    assert contents(tmp_path / "tokens") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "tokens").glob("train-*.bin"))) > 5
    assert "7.jsonl: the line that begins at byte" in output
    assert f"no executor of {spark.master} had a task for 3 s" in output
    assert "Traceback" not in output
