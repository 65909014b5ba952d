"""What a job script does as hpctrain ends and signals come, with stand-ins for hpctrain and Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpctrain.control.schedulers.profile import ClusterProfile
from support.schedulers.fake_programs import Programs, end, slurm_programs, started
from support.schedulers.job_scripts import PLAIN, script

TERM_THEN_4 = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
open({ready!r}, "w").close()
time.sleep(30)
"""
# It takes its time, so that the shell has to wait for it a second time.
USR2_THEN = """
def leave(*_):
    time.sleep(0.3)
    sys.exit({status})
signal.signal(signal.SIGUSR2, leave)
open({ready!r}, "w").close()
time.sleep(30)
sys.exit(9)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return slurm_programs(tmp_path / "bin")


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)


def job(tmp_path: Path, profile: ClusterProfile = PLAIN, **asked: object) -> str:
    more = {"run_dir": tmp_path, "folder": tmp_path}
    return script(profile, more=more, **asked)


@pytest.mark.parametrize("status", [0, 1, 2, 4, 137])
def test_only_a_resumable_run_goes_back_to_the_queue(status: int, programs: Programs, tmp_path: Path) -> None:
    programs.add("hpctrain", f"sys.exit({status})")
    code, _ = end(programs, job(tmp_path))
    assert code == status
    assert [call.arguments for call in programs.calls("hpctrain")] == [["run", "--resume", "--run-dir", str(tmp_path)]]
    assert [call.arguments for call in programs.calls("scontrol")] == ([["requeue", "7"]] if status == 4 else [])
    assert programs.calls("sbatch") == []


def test_a_requeue_that_ends_the_job_is_no_failed_one(programs: Programs, tmp_path: Path) -> None:
    """Slurm may end what the job runs before scontrol has its answer: a second job beside the first would follow."""
    programs.add("hpctrain", "sys.exit(4)")
    programs.add("scontrol", "os.killpg(0, signal.SIGTERM); time.sleep(0.1)")
    code, output = end(programs, job(tmp_path))
    assert code == 4, output
    assert [call.arguments for call in programs.calls("scontrol")] == [["requeue", "7"]]
    assert programs.calls("sbatch") == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 1, 4])
def test_the_signal_is_passed_on_and_the_status_is_hpctrains(status: int, programs: Programs, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    programs.add("hpctrain", USR2_THEN.format(ready=str(ready), status=status))
    with started(programs, job(tmp_path)) as process:
        wait_for(ready)
        # To the shell alone, as Slurm's B: does.
        os.kill(process.pid, signal.SIGUSR2)
        process.communicate(timeout=100)
        assert process.returncode == status
    assert [call.arguments for call in programs.calls("scontrol")] == ([["requeue", "7"]] if status == 4 else [])


def test_a_signal_before_hpctrain_listens_is_a_stop_too(programs: Programs, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    programs.add("hpctrain", f"open({str(ready)!r}, 'w').close(); time.sleep(30)")
    with started(programs, job(tmp_path)) as process:
        wait_for(ready)
        os.kill(process.pid, signal.SIGUSR2)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 4
    # It might be so each time, for ever.
    assert programs.calls("scontrol") == [] and "sbatch --chdir=" in output


def test_a_signal_before_hpctrain_starts_leaves_it_out(programs: Programs, tmp_path: Path) -> None:
    programs.add("hpctrain")
    ready, sent = tmp_path / "ready", tmp_path / "sent"
    # It ends when the signal is there, which bash handles after its child.
    wait = f"while not os.path.exists({str(sent)!r}): time.sleep(0.02)"
    programs.add("prepare", f"open({str(ready)!r}, 'w').close()\n{wait}")
    with started(programs, job(tmp_path, PLAIN.model_copy(update={"setup": ("prepare",)}))) as process:
        wait_for(ready)
        os.kill(process.pid, signal.SIGUSR2)
        sent.touch()
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 4
    assert programs.calls("hpctrain") == programs.calls("scontrol") == programs.calls("sbatch") == []
    assert "--time" in output and "sbatch --chdir=" in output


@pytest.mark.parametrize("first", [None, signal.SIGUSR2])
def test_a_cancelled_job_does_not_come_back(first: signal.Signals | None, programs: Programs, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    programs.add("hpctrain", "signal.signal(signal.SIGUSR2, lambda *_: None)" + TERM_THEN_4.format(ready=str(ready)))
    with started(programs, job(tmp_path)) as process:
        wait_for(ready)
        if first:
            os.kill(process.pid, first)
            time.sleep(0.2)
        # To all processes of the job, as Slurm does.
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 4
    assert programs.calls("scontrol") == []
    assert programs.calls("sbatch") == []
    command = f"sbatch --chdir={tmp_path} {tmp_path}/job.sh"
    assert output.endswith(f"\n  {command}\n")


def test_hpctrain_learns_of_what_the_shell_alone_is_told(programs: Programs, tmp_path: Path) -> None:
    """Slurm's TERM goes to the shell alone where it tracks processes by cgroups."""
    ready = tmp_path / "ready"
    programs.add("hpctrain", USR2_THEN.format(ready=str(ready), status=4))
    with started(programs, job(tmp_path)) as process:
        wait_for(ready)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=100)
        assert process.returncode == 4
    assert programs.calls("scontrol") == []


@pytest.mark.parametrize(("requeue", "scontrol"), [(False, None), (True, 1), (True, 127)])
def test_where_a_job_cannot_go_back_another_one_follows(
    requeue: bool, scontrol: int | None, programs: Programs, tmp_path: Path
) -> None:
    programs.add("hpctrain", "sys.exit(4)")
    if scontrol:
        # 127 is what a shell says of a program that is not there.
        programs.add("scontrol", f"sys.exit({scontrol})")
    text = job(tmp_path, PLAIN.model_copy(update={"requeue": requeue}))
    code, output = end(programs, text, SBATCH_PARTITION="other", SBATCH_TIMELIMIT="1")
    assert code == 4
    assert "job 8" in output
    assert bool(programs.calls("scontrol")) == requeue
    (call,) = programs.calls("sbatch")
    assert call.arguments == ["--parsable", "--dependency=afterany:7", f"--chdir={tmp_path}", f"{tmp_path}/job.sh"]
    assert not [name for name in call.environment if name.startswith("SBATCH_")]


def test_where_nothing_works_it_says_what_to_do(programs: Programs, tmp_path: Path) -> None:
    directory = tmp_path / "it's a run"
    directory.mkdir()
    programs.add("hpctrain", "sys.exit(4)")
    programs.add("scontrol", "sys.exit(1)")
    programs.add("sbatch", "sys.exit(1)")
    code, output = end(programs, job(directory))
    assert code == 4
    command = output.splitlines()[-1]
    assert command.startswith("  sbatch ")
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], check=True, capture_output=True, text=True)
    assert words.stdout.splitlines() == ["sbatch", f"--chdir={directory}", f"{directory}/job.sh"]


@pytest.mark.parametrize(("nodes", "status"), [(1, 3), (11, 4)])
def test_a_job_whose_nodes_fail_a_check_comes_back_if_it_can_have_others(
    nodes: int, status: int, programs: Programs, tmp_path: Path
) -> None:
    check = {"name": "open files", "status": "failed", "found": "100", "wanted": "at least 4,096"}
    programs.add("hpctrain")
    answer = "next(word[9:] for word in sys.argv if word.startswith('--output=')).replace('%n', '0')"
    programs.add("srun", f"open({answer}, 'w').write(json.dumps({{'checks': [{check!r}]}}))")
    programs.add("sinfo", "".join(f"print('n{node} (null) (null)')\n" for node in range(1, nodes + 1)))
    text = script(PLAIN, more={"run_dir": tmp_path, "folder": tmp_path, "check": True})
    code, output = end(programs, text, SLURM_JOB_NODELIST="n1", SLURM_JOB_PARTITION="batch")
    assert code == status and "n1 fails a check: open files: 100" in output
    assert programs.calls("hpctrain") == []
    asked = [["requeue", "7"], ["update", "JobId=7", "ExcNodeList=n1"]]
    assert [call.arguments for call in programs.calls("scontrol")] == (asked if status == 4 else [])
