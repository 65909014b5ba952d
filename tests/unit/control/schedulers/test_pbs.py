"""PBS, by what its manuals say that its programs print; no PBS runs here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.control.schedulers.qsub.pbs import Pbs, read_qstat
from support.refusals import codes, refused
from support.schedulers.slurm_programs import install

PROFILE = """\
name: here
source: the tests
scheduler: pbs
node: {gpus: 4, cores: 64, memory: 200G}
qsub: ['-l filesystems=home']
"""
# Of qstat(1B) and pbs_job_attributes(7B); a long value goes on after a tab.
JOB = """\
Job Id: {number}.pbs01
    Job_Name = digits
    Job_Owner = user@login
    job_state = {state}
    queue = gpu
    resources_used.walltime = 00:01:05
    exec_host = n1/0*64+n2/0*64
    Resource_List.walltime = 02:00:00
    comment = Not Running: Insufficient amount of
\t resource: ngpus
{more}    Submit_arguments = {script}

"""


def job(number: int, state: str, more: str = "", script: str = "/runs/one/job.sh") -> str:
    return JOB.format(number=number, state=state, more=more, script=script)


@pytest.mark.parametrize(
    ("state", "more", "expected", "exit_code", "signal"),
    [
        ("Q", "", "PENDING", 0, 0),
        ("H", "", "PENDING", 0, 0),
        ("R", "", "RUNNING", 0, 0),
        ("E", "", "COMPLETING", 0, 0),
        ("S", "", "SUSPENDED", 0, 0),
        ("F", "    Exit_status = 0\n", "COMPLETED", 0, 0),
        ("F", "    Exit_status = 2\n", "FAILED", 2, 0),
        ("F", "    Exit_status = 271\n", "CANCELLED", 0, 15),
        ("F", "    Exit_status = -29\n", "TIMEOUT", 1, 0),
        ("F", "", "CANCELLED", 0, 0),
    ],
)
def test_states(state: str, more: str, expected: str, exit_code: int, signal: int) -> None:
    (found,) = read_qstat(job(12, state, more))
    assert (found.state, found.exit_code, found.signal) == (expected, exit_code, signal)
    assert (found.id, found.nodes, found.seconds, found.limit_seconds) == ("12", "n1,n2", 65, 7200)
    assert (found.command, found.directory) == ("/runs/one/job.sh", Path("/runs/one"))


def test_several_jobs_and_what_is_none() -> None:
    assert [state.id for state in read_qstat(job(1, "R") + job(22, "F"))] == ["1", "22"]
    assert read_qstat("") == read_qstat("Job Id: 12[].pbs01\n    job_state = B\n") == []
    with refused("HT-program-failed"):
        read_qstat("Job Id: none.pbs01\n")


def test_submit_status_and_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBS_CONF_FILE", "/opt/pbs.conf")
    Path("here.yaml").write_text(PROFILE)
    script = tmp_path / "run" / "job.sh"
    listed = f"cat <<'E'\n{job(31, 'R', script=str(script))}E"
    calls = install(tmp_path, monkeypatch, qsub="echo 31.pbs01", qselect="echo 31.pbs01", qstat=listed, qdel="exit 0")
    asked = ["submit", "digits", "--cluster", "here.yaml", "--nodes", "2", "--time", "1:00:00", "--run-dir", "run"]
    assert main(asked) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run"), "31"]
    directives = [line for line in script.read_text().splitlines() if line.startswith("#PBS")]
    assert directives == [
        "#PBS -N digits",
        "#PBS -l select=2:mpiprocs=4:ncpus=64:ngpus=4:mem=200gb",
        "#PBS -l place=scatter",
        f"#PBS -o {tmp_path / 'run' / 'logs'}/",
        "#PBS -j oe",
        "#PBS -r y",
        "#PBS -l walltime=3600",
        "#PBS -l filesystems=home",
    ]
    assert f"\n    qsub {script} && exit" in script.read_text()
    assert main(["status", "run", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [state["state"] for state in status["jobs"]] == ["RUNNING"]
    assert main(["submit", "digits", "--cluster", "here.yaml", "--spare", "1", "--dry-run"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-option-not-usable-here"]
    Pbs().cancel(["31"])
    assert "qdel 31" in calls.read_text()
    # A job of which PBS does not know the folder is not the run of the folder here.
    assert main(["status", "31"]) == 0
    ended = f"cat <<'E'\n{job(31, 'F', script='job.sh')}E"
    install(tmp_path, monkeypatch, qstat=ended, squeue="exit 0", sacct="exit 0")
    monkeypatch.chdir(tmp_path / "run")
    assert main(["status", "31"]) == 2
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    # Who does not answer knows of no end.
    install(tmp_path, monkeypatch, qselect="echo 'cannot connect to server' >&2; exit 1")
    with refused("HT-program-failed"):
        Pbs().list(None, user=0, seconds=10)
    install(tmp_path, monkeypatch, qstat="echo 'cannot connect to server' >&2; exit 1")
    with refused("HT-program-failed"):
        Pbs().list(["31"], user=0, seconds=10)
    install(tmp_path, monkeypatch, qstat="echo 'qstat: Unknown Job Id 31.pbs01' >&2; exit 153")
    assert Pbs().list(["31"], user=0, seconds=10) == []
    assert main([*asked[:-1], "late", "--time", "1:00"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-option-bad-value"]
    install(tmp_path, monkeypatch, qsub="echo 'qsub: Unknown queue' >&2; exit 1")
    assert main([*asked[:-1], "other"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-job-refused"]
    assert not Path("other").exists()
