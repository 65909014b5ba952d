"""Failing and cancelling on a real Slurm, with scripts that need no ranks of a training."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import ranks_listen
from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm

pytestmark = pytest.mark.slow

SIZE = ("--cluster", "mine.yaml", "--time", "5", "--run-dir", "run")
PROFILE = "name: mine\nsource: the tests\n"

Submit = Callable[..., list[str]]


@pytest.fixture
def submit(slurm: LocalSlurm, slurm_main: Launch, tmp_path: Path) -> Iterator[Submit]:
    """``submit(program, option, …)`` of a script; returns the jobs' numbers."""
    (tmp_path / "mine.yaml").write_text(PROFILE)
    jobs: list[str] = []

    def submit(program: str, *options: str) -> list[str]:
        (tmp_path / "work.py").write_text(program)
        done = slurm_main("submit", "work.py", *SIZE, *options)
        assert done.returncode == 0, done.stdout
        jobs.extend(json.loads((tmp_path / "run" / "submission.json").read_text())["jobs"])
        return jobs

    yield submit
    slurm.run("scancel", *jobs)
    slurm.wait_idle()


def log_of(run: Path) -> str:
    return "".join(log.read_text() for log in run.glob("logs/job-*.log"))


def listening(run: Path) -> None:
    """Wait until the ranks can be asked to stop."""
    deadline = time.monotonic() + 120
    while not ranks_listen(RunDirectory(run)):
        assert time.monotonic() < deadline, log_of(run)
        time.sleep(0.2)


def test_what_was_submitted_runs(slurm: LocalSlurm, submit: Submit, tmp_path: Path) -> None:
    """Also where the script and what it imports are edited before the job starts. Paths of data stay."""
    (tmp_path / "data.txt").write_text("data of now")
    (tmp_path / "sibling.py").write_text("WORD = 'code of then'")
    show = "import sibling; print(sibling.WORD, open('data.txt').read(), sep='; ')"
    (job,) = submit(show, "--sbatch", "hold", "--sbatch", "mem=1000")
    for name in ("sibling.py", "work.py"):
        (tmp_path / name).write_text("raise SystemExit('edited')")
    slurm.run("scontrol", "release", job)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    printed = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "code of then; data of now" in printed, log_of(tmp_path / "run")
    used = rf"job {job} used 1 of 5 min, 0\.\d of 1\.0 GB in the ranks on \S+, \d+% of the CPUs' time"
    log = log_of(tmp_path / "run")
    assert re.search(rf"{used}; next time: .* --time \d --sbatch mem=1G\n", log), log


POLLS = """
import sys, time
import hpctrain as ht
comm = ht.init()
while not ht.should_stop():
    comm.barrier()
    time.sleep(0.1)
open(f"saved-{comm.rank}", "w").close()
sys.exit(ht.RESUMABLE)
"""


@pytest.mark.long
def test_cancel_lets_the_ranks_save_their_state(
    slurm: LocalSlurm, submit: Submit, slurm_main: Launch, tmp_path: Path
) -> None:
    """Of several nodes, whose daemons Slurm would end first; and the job does not come back."""
    (job,) = submit(POLLS, "--nodes", "2", "--backend", "mpi")
    slurm.wait_for(job, "RUNNING")
    listening(tmp_path / "run")
    done = slurm_main("cancel", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout
    assert "is resumable" in done.stdout
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}, log_of(tmp_path / "run")
    slurm.wait_idle()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "resumable"


def test_a_job_that_fails_before_the_run_begins(slurm: LocalSlurm, slurm_main: Launch, tmp_path: Path) -> None:
    """Its log has the reason, which is shown."""
    (tmp_path / "mine.yaml").write_text(f"{PROFILE}setup: ['echo no-such-module is not there >&2; exit 7']\n")
    (tmp_path / "work.py").write_text("")
    done = slurm_main("submit", "work.py", *SIZE, "--wait")
    (log,) = (tmp_path / "run" / "logs").glob("job-*.log")
    reason = f"no-such-module is not there ({log})"
    assert done.returncode == 1 and reason in done.stdout
    status = json.loads(slurm_main("status", "run", "--json").stdout)
    assert status["state"] == "stopped" and status["message"].endswith(reason)


# In place of hpctrain in the job's steps: the second node of the first job has too few open files.
BROKEN = """\
#!/bin/bash
if [[ $1 == doctor ]]; then
    [[ $SLURM_NODEID == 0 || -e {broken} ]] || echo $SLURMD_NODENAME >{broken}
    [[ $SLURMD_NODENAME != $(cat {broken}) ]] || ulimit -n 100
fi
exec {hpctrain} "$@"
"""


@pytest.mark.parametrize(
    "spare", [pytest.param(0, id="to the queue"), pytest.param(1, id="spare", marks=pytest.mark.thorough)]
)
def test_a_node_that_fails_a_check_is_left_out(
    spare: int, slurm: LocalSlurm, submit: Submit, slurm_main: Launch, tmp_path: Path
) -> None:
    """By a spare node in the same job, else by another node after the job was requeued."""
    broken, programs = tmp_path / "broken", tmp_path / "programs"
    programs.mkdir()
    hpctrain = Path(sys.executable).parent / "hpctrain"
    (programs / "hpctrain").write_text(BROKEN.format(broken=broken, hpctrain=hpctrain))
    (programs / "hpctrain").chmod(0o755)
    path = os.pathsep.join([str(programs), str(hpctrain.parent), os.environ["PATH"]])
    (tmp_path / "mine.yaml").write_text(f"{PROFILE}environment: {{PATH: '{path}'}}\n")
    size = ("--nodes", "2", "--check") if spare == 0 else ("--nodes", "1", "--spare", "1")
    (job,) = submit("import hpctrain as ht; print('size', ht.init().size)", *size, "--backend", "mpi")
    ended = slurm.wait_for(job, "COMPLETED", "FAILED")
    run, node = tmp_path / "run", broken.read_text().strip()
    assert ended["JobState"] == "COMPLETED", log_of(run)
    plan = json.loads((run / "plan.json").read_text())
    assert len(plan["hosts"]) == 2 - spare and node not in [host["host"] for host in plan["hosts"]]
    assert ended["Restarts"] == ("0" if spare else "1")
    assert ended["ExcNodeList"] == ("(null)" if spare else node)
    assert f"{node} fails a check: open files: 100" in log_of(run)
    (said,) = json.loads(slurm_main("status", "run", "--json").stdout)["excluded"]
    assert said.startswith(f"{node} is left out") and "open files" in said
