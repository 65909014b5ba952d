"""The state of jobs, from what Slurm's programs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.schedulers.jobs import JobState, is_job_id
from hpctrain.control.schedulers.slurm.queue import job_states
from support.refusals import refused
from support.schedulers.slurm_programs import NO_ACCOUNTING, NO_CONTROLLER, UNKNOWN_JOB, install, prints, row

ODD = "/runs/odd dir|=\n$(x) StdErr=y,z:1"


def job_state(number: str) -> JobState | None:
    return next(iter(job_states([number])), None)


def test_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = row("12", "RUNNING", ODD, start="1795249391", used="1-02:03:04", limit="UNLIMITED", nodes="n[1-2]")
    install(tmp_path, monkeypatch, squeue=prints(text))
    job = job_state("12")
    assert job and job.live and not job.waits
    assert (job.id, job.state, job.reason, job.nodes) == ("12", "RUNNING", "", "n[1-2]")
    assert (job.start, job.seconds, job.limit_seconds) == (1795249391.0, 93784, None)
    assert job.directory == Path(ODD)


def test_how_jobs_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = row("2", "FAILED", "/tmp", reason="NonZeroExitCode", status="1792", nodes="n1", used="0:01")
    killed = row("8", "FAILED", "/tmp", status="9", nodes="n1")
    install(tmp_path, monkeypatch, squeue=prints(killed + failed))
    first, second = job_states(["3_2", "2"])
    assert (first.id, first.exit_code, first.signal, first.live) == ("2", 7, 0, False)
    assert (second.id, second.exit_code, second.signal) == ("8", 0, 9)


def test_the_jobs_of_a_user_in_the_order_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, squeue=prints("".join(row(job, "PENDING", "/tmp") for job in ("100", "12", "9"))))
    assert [job.id for job in job_states(None, user=0)] == ["9", "12", "100"]


@pytest.mark.parametrize("squeue", [UNKNOWN_JOB, "true"])
def test_an_unknown_job(squeue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, squeue=squeue, sacct=NO_ACCOUNTING)
    assert job_state("99") is None


def test_the_accounting_remembers_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ["7", "CANCELLED by 1000", "None", "1795249391", "00:10:00", "01:00:00", "n1", "0:15", ODD, "\n"]
    install(tmp_path, monkeypatch, squeue=UNKNOWN_JOB, sacct=prints("\x1f".join(fields)))
    job = job_state("7")
    assert job and (job.state, job.signal, job.seconds, job.limit_seconds) == ("CANCELLED", 15, 600, 3600)
    assert job.directory == Path(ODD) and not job.live


def test_a_silent_controller_is_not_an_unknown_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, squeue=NO_CONTROLLER)
    with refused("HT-slurm-command-failed") as caught:
        job_state("1")
    assert caught.value.exit_code == 1 and "Unable to" in caught.value.values["reason"]
    install(tmp_path, monkeypatch, squeue="exec sleep 60")
    with refused("HT-program-no-answer", program="squeue", seconds=0.2):
        job_states(["1"], seconds=0.2)


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("HT-program-not-found", program="squeue"):
        job_state("1")


def test_the_users_own_formats_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SQUEUE_STATES", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "standard")
    install(tmp_path, monkeypatch, squeue=f"env > {tmp_path}/seen; {prints(row('1', 'RUNNING', '/tmp'))}")
    job_state("1")
    seen = (tmp_path / "seen").read_text()
    assert "SQUEUE_" not in seen and "SLURM_TIME_FORMAT=%s" in seen


def test_job_numbers() -> None:
    assert all(map(is_job_id, ["1", "12_3", "4294967295"]))
    assert not any(map(is_job_id, ["", "0", "12_", "12_[1-3]", "./12", "-1", "12;rm", "1e3", "²"]))
