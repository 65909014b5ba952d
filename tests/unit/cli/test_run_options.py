"""What is said of how ranks are started and stopped, and of a run to go on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.plan import Plan
from hpctrain.rundir import RunDirectory, read_model


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def plan() -> Plan:
    return read_model(Path("run/plan.json"), Plan)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--launcher", "mpiexec"], "unknown launcher 'mpiexec'\n  valid: auto, mpirun"),
        (["--stop-signal", "KILL"], "--stop-signal KILL cannot ask for a stop"),
        (["--stop-signal", "usr3"], "did you mean 'USR2'?"),
        (["--stop-seconds", "0"], "leaves no time to stop"),
        (["--stop-seconds", "nan"], "leaves no time to stop"),
        (["--env", "A B=1"], "'A B' is no name of a variable"),
        (["--env", "NOT_SET_ANYWHERE"], "give it a value: --env NOT_SET_ANYWHERE=VALUE"),
        (["--launcher-arguments", "--mca 'x"], "No closing quotation"),
        (["--mount", "/data"], "name it: --container IMAGE"),
        (["--container", "x.sif", "--container-runtime", "docker"], "unknown container runtime 'docker'"),
        (["--resume"], "--resume: which run?"),
    ],
)
def test_misuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_nothing_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", "--run-dir", "run"]) == 2
    assert "run holds no run" in capsys.readouterr().err


def test_the_plan_keeps_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "it's $HOME")
    Path("train.py").touch()
    options = ["--env", "A=1=2", "--env", "FROM_HERE", "--launcher-arguments", "--mca a 'b c'", "--ssh-port", "2222"]
    options += ["--stop-signal", "SIGUSR1", "--stop-seconds", "7", "--idle-restarts", "0"]
    assert main(["run", "train.py", "--run-dir", "run", *options]) == 0
    made = plan()
    assert made.start.environment == {"A": "1=2", "FROM_HERE": "it's $HOME"}
    assert (made.start.arguments, made.start.ssh_port) == (("--mca", "a", "b c"), 2222)
    assert made.stop.model_dump() == {"signal": "USR1", "seconds": 7.0, "idle_restarts": 0}


def test_resuming_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    """Begun, left, gone on with as it was begun, and refused where it is another."""
    Path("train.py").write_text(
        "import os, signal, sys\nif os.path.exists('ready'): sys.exit()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\nsys.exit(4)\n"
    )
    assert main(["run", "train.py", "--resume", "--run-dir", "run", "--stop-seconds", "7", "--", "a"]) == 4
    assert "to go on: hpctrain run --resume --run-dir run\n" in capfd.readouterr().err
    assert main(["run", "train.py", "--resume", "--run-dir", "run", "--", "b"]) == 2
    assert "the run has arguments=['a'], and arguments=['b'] was asked for" in capfd.readouterr().err
    assert main(["run", "digits", "--resume", "--run-dir", "run"]) == 2
    assert "the run is of train.py, which is no recipe" in capfd.readouterr().err
    assert main(["run", "--resume", "--run-dir", "run", "--dry-run"]) == 0
    assert "hpctrain.train" in capfd.readouterr().out
    Path("run/stop").touch()
    Path("ready").touch()
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert plan().stop.seconds == 7
    assert json.loads(RunDirectory(Path("run")).summary.read_text())["status"] == "done"
    assert not Path("run/stop").exists()
    summary = RunDirectory(Path("run")).summary.read_text()
    # As after a launcher that died in between.
    Path("run/summary.json").unlink()
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert capfd.readouterr().err.endswith("hpctrain: run is done\n")
    assert RunDirectory(Path("run")).summary.read_text() == summary
