"""Jobs that Slurm sends back to the queue by itself: their ranks save their state first, and go on from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import ranks_listen
from support.launching import Launch
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm
from support.slurm.slurm_conf import Settings

pytestmark = pytest.mark.long

FREEZER = Path("/sys/fs/cgroup/freezer")

COUNTS = """
import sys, time
from pathlib import Path
import hpctrain as ht
comm = ht.init()
state = Path(f"state-{comm.rank}")
begin = step = int(state.read_text()) if state.exists() else 0
with open(f"begins-{comm.rank}", "a") as file:
    print(begin, file=file)
while begin == 0:
    step += 1
    if ht.should_stop():
        # As long as a checkpoint may take.
        time.sleep(3)
        state.write_text(str(step))
        sys.exit(ht.RESUMABLE)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[LocalSlurm]:
    """Two nodes, whose processes Slurm tracks by cgroups, as on clusters."""
    if reason := local_slurm.obstacle():
        pytest.skip(reason)
    if not os.access(FREEZER, os.W_OK):
        pytest.skip(f"{FREEZER} cannot be written: mount cgroup v1's freezer there")
    # Slurm names cgroups by nodes and jobs, and another cluster of this machine may have the same.
    nodes = tuple(f"n{os.getpid()}{letter}" for letter in "ab")
    topology = f"SwitchName=s1 Nodes={','.join(nodes)}\n"
    with LocalSlurm(Settings(nodes=nodes, topology=topology, tracking="cgroup", kill_seconds=12)) as cluster:
        yield cluster
    for node in nodes:
        for folder, _, _ in os.walk(FREEZER / f"slurm_{node}", topdown=False):
            Path(folder).rmdir()


def preempt(slurm: LocalSlurm, job: str) -> None:
    """By a job that wants all nodes for a moment, with a time to save between Slurm's signals."""
    slurm.run("sbatch", "--partition=short", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def requeue(slurm: LocalSlurm, job: str) -> None:
    slurm.run("scontrol", "requeue", job)


@pytest.mark.parametrize(
    ("sent_back", "launcher"),
    [(requeue, "mpirun"), pytest.param(preempt, "srun-pmix", marks=pytest.mark.thorough)],
)
def test_ranks_save_and_go_on(
    slurm: LocalSlurm,
    slurm_main: Launch,
    tmp_path: Path,
    sent_back: Callable[[LocalSlurm, str], None],
    launcher: str,
) -> None:
    (tmp_path / "work.py").write_text(COUNTS)
    size = ("--cluster", "auto", "--time", "5", "--nodes", "2", "--tasks-per-node", "1")
    how = ("--gpus-per-node", "0", "--backend", "mpi", "--launcher", launcher, "--run-dir", "run")
    done = slurm_main("submit", "work.py", *size, *how)
    assert done.returncode == 0, done.stdout
    run = RunDirectory(tmp_path / "run")
    (job,) = json.loads((run.path / "submission.json").read_text())["jobs"]
    try:
        deadline = time.monotonic() + 120
        while not ranks_listen(run):
            assert time.monotonic() < deadline, log_of(run)
            time.sleep(0.2)
        sent_back(slurm, job)
        slurm.wait_for(job, "COMPLETED", "FAILED", timeout=240)
    finally:
        slurm.run("scancel", job)
        slurm.wait_idle()
    begins = [(tmp_path / f"begins-{rank}").read_text().split() for rank in range(2)]
    assert begins[0] == begins[1], log_of(run)
    assert len(begins[0]) == 2 and int(begins[0][1]) > 0, log_of(run)
    assert slurm.job(job)["Restarts"] == "1"
    assert json.loads(run.summary.read_text())["status"] == "done"


def log_of(run: RunDirectory) -> str:
    logs = [*run.path.glob("logs/job-*.log"), *run.path.glob("logs/rank-*.log"), run.events]
    return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs if log.exists())
