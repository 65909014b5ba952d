"""Shards that a job makes on several nodes of a real Slurm: the same bytes, also where it begins several times."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import read_records
from hpctrain.common.shards.fake import FakeSet, make_fake
from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm
from support.slurm.submitted_runs import events, wait_until

pytestmark = pytest.mark.slow

SHARD = ("--shard-mb", "0.05", "--seed", "3")
JOB = ("--cluster", "auto", "--nodes", "2", "--tasks-per-node", "1", "--time", "5")

Submitted = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imagenet")
    make_fake(folder, FakeSet(images=2000, classes=10, seed=0, size=40, broken=4))
    return folder


@pytest.fixture
def shard(slurm: LocalSlurm, slurm_main: Launch, source: Path) -> Iterator[Submitted]:
    """``shard("out", option, …)``; what still runs of it is cancelled after the test."""
    yield lambda out, *options: slurm_main("data", "shard", str(source), out, *SHARD, *options)
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_idle()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def worker(run: Path) -> psutil.Process:
    """The rank that makes shards."""
    rank = read_records(RunDirectory(run))[1].process()
    assert rank
    return rank


@pytest.mark.thorough
def test_a_killed_rank_and_a_time_limit(slurm: LocalSlurm, shard: Submitted, tmp_path: Path) -> None:
    assert shard("alone").returncode == 0
    wanted = contents(tmp_path / "alone")
    run, out = tmp_path / "run", tmp_path / "out"

    def done() -> dict[Path, int]:
        # Whole ones: each has its record.
        names = [path.name.removesuffix(".json") for path in (out / "records").glob("train-*.json")]
        return {out / name: (out / name).stat().st_mtime_ns for name in names}

    said = shard("out", *JOB, "--run-dir", str(run))
    assert said.returncode == 0, said.stdout
    (job,) = json.loads((run / "submission.json").read_text())["jobs"]

    # Rank 1 is killed in the middle: the job goes back to the queue by itself.
    wait_until("some shards", lambda: len(done()) >= 5)
    worker(run).send_signal(signal.SIGKILL)
    wait_until("the requeue", lambda: slurm.job(job)["Restarts"] == "1")
    first = done()
    assert 5 <= len(first) < len(list((tmp_path / "alone").glob("train-*.tar")))
    assert not (out / "manifest.json").exists()

    # The signal ahead of the time limit: what is being made is finished, the rest is left.
    wait_until("more shards", lambda: len(done()) >= len(first) + 5)
    rank = worker(run)
    rank.suspend()
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    wait_until("the file that asks for a stop", RunDirectory(run).stop.exists)
    # Rank 0 looks for it once a second, with what the other has made.
    time.sleep(1.1)
    rank.resume()
    wait_until("the next requeue", lambda: slurm.job(job)["Restarts"] == "2")
    assert "asked to stop: what is not made yet is left" in (run / "logs" / "rank-0.log").read_text()
    second = done()

    slurm.wait_for(job, "COMPLETED")
    assert contents(out) == wanted
    assert len(events(run, "start")) == 3
    # Nothing that was done was made again.
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert {path: path.stat().st_mtime_ns for path in second} == second


@pytest.mark.long
def test_what_is_wrong_ends_the_job(slurm: LocalSlurm, slurm_main: Launch, source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for archive in source.iterdir():
        (broken / archive.name).symlink_to(archive)
    (broken / "ILSVRC2012_img_val.tar").unlink()
    (broken / "ILSVRC2012_img_val.tar").write_bytes((source / "ILSVRC2012_img_val.tar").read_bytes()[:5000])
    run = tmp_path / "run"
    command = ("data", "shard", str(broken), "out", *SHARD, *JOB, "--run-dir", str(run))
    shown = slurm_main(*command, "--dry-run")
    assert shown.returncode == 0, shown.stdout
    assert "#SBATCH --nodes=2" in shown.stdout
    assert not run.exists()
    said = slurm_main(*command, "--wait")
    assert said.returncode == 1, said.stdout
    log = (run / "logs" / "rank-0.log").read_text()
    assert re.search(r"on \S+: \S+/ILSVRC2012_img_val\.tar: no tar file, cut short or damaged", log), log
    (job,) = json.loads((run / "submission.json").read_text())["jobs"]
    assert slurm.job(job)["Restarts"] == "0"
    assert not (tmp_path / "out").exists()
