"""The state of jobs, from what Slurm's programs print."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_programs import NO_ACCOUNTING, NO_CONTROLLER, UNKNOWN_JOB, install, prints, row

from hpctrain.batch.queue import is_job_id, job_state, job_states
from hpctrain.cluster.programs import run_program
from hpctrain.errors import HpctrainError

ODD = "/runs/odd dir|=\n$(x) StdErr=y,z:1"


def test_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = row("12", "RUNNING", ODD, start="1795249391", used="1-02:03:04", limit="UNLIMITED", nodes="n[1-2]")
    install(tmp_path, monkeypatch, squeue=prints(text))
    job = job_state("12")
    assert job and job.live and not job.waits and job.array_task is None
    assert (job.id, job.state, job.reason, job.nodes) == ("12", "RUNNING", "", "n[1-2]")
    assert (job.start, job.seconds, job.limit_seconds) == (1795249391.0, 93784, None)
    assert job.directory == Path(ODD)


def test_how_jobs_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = row("2", "FAILED", "/tmp", reason="NonZeroExitCode", status="1792", nodes="n1", used="0:01")
    killed = row("3_2", "FAILED", "/tmp", number="8", status="9", nodes="n1", restarts="2")
    install(tmp_path, monkeypatch, squeue=prints(killed + failed))
    first, second = job_states(["3", "2"])
    assert (first.id, first.exit_code, first.signal, first.live) == ("2", 7, 0, False)
    assert (second.id, second.exit_code, second.signal, second.restarts) == ("3_2", 0, 9, 2)
    assert (second.job, second.number, second.array_task) == ("3", "8", "2")


def test_tasks_that_wait_are_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = row("3_[2,4-9%2]", "PENDING", "/tmp", reason="JobArrayTaskLimit", start="1795260180")
    install(tmp_path, monkeypatch, squeue=prints(text))
    job = job_state("3")
    assert job and job.waits and job.array_task == "2,4-9"
    assert [task for task in range(12) if job.has_task(task)] == [2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("squeue", [UNKNOWN_JOB, "true"])
def test_an_unknown_job(squeue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, squeue=squeue, sacct=NO_ACCOUNTING)
    assert job_state("99") is None


def test_the_accounting_remembers_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ["7", "7", "CANCELLED by 1000", "None", "1795249391", "00:10:00", "01:00:00", "n1", "0:15", ODD, "\n"]
    install(tmp_path, monkeypatch, squeue=UNKNOWN_JOB, sacct=prints("\x1f".join(fields)))
    job = job_state("7")
    assert job and (job.state, job.signal, job.seconds, job.limit_seconds) == ("CANCELLED", 15, 600, 3600)
    assert job.directory == Path(ODD) and not job.live


def test_a_silent_controller_is_not_an_unknown_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, squeue=NO_CONTROLLER)
    with pytest.raises(HpctrainError, match="Unable to contact slurm controller") as caught:
        job_state("1")
    assert caught.value.exit_code == 1
    install(tmp_path, monkeypatch, squeue="exec sleep 60")
    with pytest.raises(HpctrainError, match=r"squeue did not answer within 0\.2 s"):
        job_states(["1"], seconds=0.2)


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HpctrainError, match="squeue is not on the PATH"):
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


def test_a_program_gets_its_arguments_unquoted() -> None:
    assert run_program("printf", "%s", "$(id); 'x'").stdout == "$(id); 'x'"
