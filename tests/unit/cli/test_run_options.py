"""What is said of how ranks are started and stopped, and of a run to go on with."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import StoppedEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.shards.folders import training_fingerprint
from support import needs
from support.golden import check_text
from support.refusals import codes
from support.written_checkpoints import progress_of, write_checkpoint


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def plan() -> Plan:
    return read_model(Path("run/plan.json"), Plan)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--launcher", "mpiexec"], "HT-choice-unknown"),
        (["--stop-seconds", "0"], "--stop-seconds"),
        (["--env", "A B=1"], "HT-option-bad-value"),
        (["--env", "NOT_SET_ANYWHERE"], "HT-variable-not-set"),
        (["--launcher-arguments", "--mca 'x"], "HT-option-bad-value"),
        (["--mount", "/data"], "HT-option-needs-another"),
        (["--resume"], "HT-argument-missing"),
        (["--accept-changes", "--run-dir", "run"], "HT-option-needs-another"),
    ],
)
def test_misuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(Path().iterdir())


@needs.pytorch
def test_the_plan_keeps_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "it's $HOME")
    Path("train.py").touch()
    options = ["--env", "A=1=2", "--env", "FROM_HERE", "--launcher-arguments", "--mca a 'b c'"]
    options += ["--stop-seconds", "7", "--restarts", "5"]
    assert main(["run", "train.py", "--run-dir", "run", *options]) == 0
    made = plan()
    assert made.start.environment == {"A": "1=2", "FROM_HERE": "it's $HOME"}
    assert made.start.arguments == ("--mca", "a", "b c")
    assert made.stop.model_dump() == {"seconds": 7.0, "restarts": 5}


@pytest.mark.slow
def test_resuming_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    """Begun, left, gone on with as it was begun, and refused where it is another."""
    Path("train.py").write_text(
        "import os, signal, sys\nif os.path.exists('ready'): sys.exit()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\nsys.exit(4)\n"
    )
    assert main(["run", "train.py", "--resume", "--run-dir", "run", "--stop-seconds", "7", "--", "a"]) == 4
    assert [event.reason for event in events() if isinstance(event, StoppedEvent)] == ["SIGUSR2"]
    ends = [line.split()[-5:] for line in capfd.readouterr().err.splitlines()]
    assert ["hpctrain", "run", "--resume", "--run-dir", "run"] in ends
    assert main(["run", "train.py", "--resume", "--run-dir", "run", "--", "b"]) == 2
    assert codes(capfd.readouterr().err) == ["HT-run-other-settings"]
    assert main(["run", "digits", "--resume", "--run-dir", "run"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-run-other-settings"] and "train.py" in said and "recipe" in said
    assert main(["run", "--resume", "--run-dir", "run", "--set", "epochs=1"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-option-not-usable-here"] and "--set epochs" in said and "train.py" in said
    assert main(["run", "--resume", "--run-dir", "run", "--dry-run"]) == 0
    assert "hpctrain.worker.train" in capfd.readouterr().out
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
    check_text("run-done", capfd.readouterr().err.splitlines()[-1])
    assert RunDirectory(Path("run")).summary.read_text() == summary


def events() -> list[Any]:
    return list(read_events(Path("run/events.jsonl")))


def begun(*options: str) -> None:
    """A run of one rank that was stopped at once."""
    Path("train.py").write_text("import os, signal, sys\nos.kill(os.getpid(), signal.SIGUSR2)\nsys.exit(4)\n")
    assert main(["run", "train.py", "--run-dir", "run", *options]) == 4


def test_a_dry_run_says_what_a_mesh_sends(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    assert main(["run", "train.py", "-np", "4", "--mesh", "dp_shard=2,tp=2", "--oversubscribe", "--dry-run"]) == 0
    said = capfd.readouterr()
    check_text("run-mesh-neighbours", said.err[said.err.index("hpctrain: mesh") :])
    assert "HPCTRAIN_MESH=dp_replicate=1,dp_shard=2,pp=1,cp=1,tp=2" in said.out
    assert main(["run", "train.py", "-np", "3", "--mesh", "dp_shard=2", "--dry-run"]) == 2
    said = capfd.readouterr().err
    assert "mesh dp_shard" in said and " 3 " in said
    assert main(["run", "train.py", "-np", "2", "--mesh", "dp_shard=2", "--backend", "horovod", "--dry-run"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-backend-unfit"] and "horovod" in said and "dp_shard 2" in said


def programs(monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Programs that come first on the PATH, whose other programs are the system's."""
    folder = Path("bin").absolute()
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)


@needs.pytorch
def test_resuming_with_another_recipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Shows all that differs, refuses, and, where that is accepted, goes on with what was asked for, on record."""
    programs(monkeypatch, mpirun=f"{MPIRUN}\nexit 1")
    here = ["--run-dir", "run"]
    assert main(["run", "digits", "-np", "2", *here, "--set", "batch={per_rank: 32}"]) == 1
    before = Path("run/plan.json").read_text()
    capfd.readouterr()
    for work in (["digits", "--set", "batch={per_rank: 32}"], []):
        assert main(["run", *work, "--resume", *here, "--set", "epochs=5", "--set", "optimizer.momentum=0.5"]) == 2
        said = capfd.readouterr().err
        assert codes(said) == ["HT-run-other-settings"]
        rows = [line.split() for line in said.splitlines()]
        assert ["optimizer.momentum", "0.9", "0.5"] in rows and ["epochs", "20", "5"] in [row[:3] for row in rows]
    assert Path("run/plan.json").read_text() == before
    changed = ["run", "--resume", *here, "--set", "epochs=5", "--set", "guard.every=7"]
    assert main([*changed, "--accept-changes", "--dry-run"]) == 0
    assert Path("run/plan.json").read_text() == before
    assert main([*changed, "--accept-changes"]) == 4
    recipe = plan().recipe
    assert recipe is not None
    assert (recipe.epochs, recipe.guard.every, recipe.global_batch) == (5, 7, 64)
    assert main(["run", "--resume", *here]) == 4
    kinds = [event.event for event in events()]
    again = ["start", "fault", "end"]
    assert kinds == [*again, "changed", *again, *again]
    assert events()[3].differences == {"epochs": (20, 5), "guard.every": (100, 7)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.name=resnet18", "model.name=digits_cnn"),
        ("data.split_seed=1", "data.split_seed=None"),
        ("epochs=5", "epochs=20"),
    ],
)
@needs.pytorch
def test_a_checkpoint_is_of_one_model_optimizer_and_data(
    change: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs(monkeypatch, mpirun=f"{MPIRUN}\nexit 1")
    assert main(["run", "digits", "-np", "2", "--run-dir", "run"]) == 1
    resume = ["run", "--resume", "--run-dir", "run", "--accept-changes"]
    # Without one there is nothing that it would have to fit.
    assert main([*resume, "--set", change, "--dry-run"]) == 0
    path = checkpoint_of_now(epoch=6)
    before = Path("run/plan.json").read_text()
    assert main([*resume, "--set", change]) == 2
    error = capfd.readouterr().err
    assert str(path) in error and set(said.split("=")) <= {*error.split()} and "another --run-dir" in error
    assert Path("run/plan.json").read_text() == before
    for fits in ("optimizer.learning_rate=0.1", "precision=bf16", "epochs=6"):
        assert main([*resume, "--set", fits, "--dry-run"]) == 0


def checkpoint_of_now(**progress: Any) -> Path:
    of = progress_of(10, **progress)
    return write_checkpoint(Path("run/checkpoints"), of, {}, plan=plan().model_dump(mode="json"))


@needs.pytorch
def test_a_text_may_be_elsewhere_but_not_another_nor_of_another_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs(monkeypatch, mpirun=f"{MPIRUN}\nexit 1")
    for name in ("tokens", "others"):
        source = Path(f"{name}.jsonl")
        source.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(200)))
        prepare = ["--tokenizer", "bytes", "--validation-share", "0.5"]
        assert main(["data", "prepare-text", str(source), name, *prepare]) == 0
    options = ["--backend", "mpi", "-np", "2", "--run-dir", "run", "--set", "data.path=tokens"]
    assert main(["run", "gpt2-124m", "--smoke", *options]) == 1
    checkpoint_of_now(samples=training_fingerprint(Path("tokens"), "text"))
    shutil.copytree("tokens", "copy")
    resume = ["run", "--resume", "--run-dir", "run", "--accept-changes", "--set"]
    assert main([*resume, "data.path=copy", "--dry-run"]) == 0
    capfd.readouterr()
    for old, new in {
        "data.path=tokens": "data.path=others",
        "model.layers=4": "model.layers=6",
        "data.epoch_samples=1600": "data.epoch_samples=160",
    }.items():
        assert main([*resume, new]) == 2
        said = capfd.readouterr().err
        assert codes(said) == ["HT-checkpoint-of-other-value"] and {*old.split("="), *new.split("=")} <= {*said.split()}


@needs.pytorch
def test_a_run_that_is_done_can_be_made_longer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs(monkeypatch, mpirun=f"{MPIRUN}\nexit 1")
    assert main(["run", "digits", "-np", "2", "--run-dir", "run"]) == 1
    with Path("run/events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "event": "end", "status": "done"}\n')
    assert main(["run", "--resume", "--run-dir", "run"]) == 0
    assert main(["run", "--resume", "--run-dir", "run", "--set", "epochs=21"]) == 2
    assert main(["run", "--resume", "--run-dir", "run", "--set", "epochs=21", "--accept-changes"]) == 4
    assert [event.attempt for event in events() if event.event == "start"] == [1, 2]


MPIRUN = "if [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi"


def test_the_backend_and_the_hosts_are_those_of_now(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = socket.gethostname()
    begun("-H", f"{here}:1")
    assert (plan().backend, plan().asked_backend) == ("single", "auto")
    programs(monkeypatch, mpirun=MPIRUN)
    Path("hosts").write_text(f"{here} slots=2\n")
    resume = ["run", "--resume", "--run-dir", "run", "--hostfile", "hosts", "-np", "2", "--dry-run"]
    assert main(resume) == 0
    assert f"--host {here}:2 " in capfd.readouterr().out
    assert main([*resume, "-H", here]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-options-exclude-each-other"] and "--hosts" in said and "--hostfile" in said
    assert main([*resume, "--backend", "single"]) == 2


def test_what_hpctrain_itself_cannot_do_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun()
    Path("python").write_text("#!/nope/interpreter\n")
    Path("python").chmod(0o755)
    assert main(["run", "--resume", "--run-dir", "run", "--python", str(Path("python").absolute())]) == 2
    assert "cannot start " in capfd.readouterr().err
    start, fault, end = events()[-3:]
    assert (start.attempt, end.status) == (2, "failed")
    assert fault.message.startswith("cannot start ")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
