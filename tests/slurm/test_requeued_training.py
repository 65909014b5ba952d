"""Training on a real Slurm that is stopped, killed and requeued: to the same bits as without."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.slurm.local_slurm import LocalSlurm
from support.slurm.submitted_runs import (
    SIZE,
    Submit,
    events,
    held,
    jobs_of,
    newest_state,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.slow

# The end of a job is announced at the first look at its limit, up to 30 s after it began.
BRIEF = """\
name: brief
source: the tests
time: "1"
signal_seconds: 40
"""
# So many that a fast machine is still training when a test looks: an epoch takes it a tenth of a second.
EPOCHS = 24


@pytest.fixture
def brief(tmp_path: Path) -> tuple[str, ...]:
    """Options for jobs on two nodes whose time is too short."""
    (tmp_path / "brief.yaml").write_text(BRIEF)
    return ("--cluster", "brief.yaml", *SIZE)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The final state of ``EPOCHS`` epochs on two ranks of this machine, never stopped."""
    program = str(Path(sys.executable).parent / "hpctrain")
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [program, "run", "digits", "-np", "2", "--set", f"epochs={EPOCHS}", "--run-dir", "run"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return newest_state(folder / "run")


def stop(slurm: LocalSlurm, run: Path, attempt: int, job: str) -> None:
    """Announce the end of a job, as its time limit would."""
    with held(run, attempt):
        slurm.run("scancel", "--batch", "--signal=USR2", job)
        wait_until("the announcement", (run / "stop").exists)


@pytest.mark.thorough
def test_a_job_whose_time_is_too_short_requeues_itself(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: dict[str, bytes]
) -> None:
    """By its limit the first time; the second time it is told by hand, which takes no half minute."""
    run = tmp_path / "run"
    options = ("--set", f"epochs={EPOCHS}", "--run-dir", "run", "--wait")
    with ThreadPoolExecutor(1) as waiting:
        submitted = waiting.submit(submit, "digits", *brief, *options, timeout=500)
        with held(run):
            wait_until("the announcement", (run / "stop").exists)
            (job,) = jobs_of(run)
            slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
        stop(slurm, run, 2, job)
        result = submitted.result()
    assert result.returncode == 0, result.stdout
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    starts = [event["iteration"] for event in events(run, "start")]
    assert len(starts) >= 3, f"requeued {len(starts) - 1} times"
    assert starts == sorted(set(starts)), "each part got further"
    assert newest_state(run) == uninterrupted
    (log,) = (run / "logs").glob("job-*.log")
    # On a busy machine a part may be over before its ranks start.
    requeued = log.read_text().count("goes back to the queue")
    assert requeued >= len(starts) - 1
    assert requeued == int(slurm.job(job)["Restarts"])


@pytest.mark.long
def test_the_signal_to_every_process_of_a_job(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: dict[str, bytes]
) -> None:
    """``scancel --signal`` goes to the tasks of srun, that is the ranks, and to none of the batch script."""
    submit("digits", *brief, "--set", f"epochs={EPOCHS}", "--time", "10", "--launcher", "srun-pmix", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    with held(run):
        slurm.run("scancel", "--signal=USR2", job)
    wait_for_end(run)
    assert len(events(run, "start")) == 2
    assert newest_state(run) == uninterrupted
