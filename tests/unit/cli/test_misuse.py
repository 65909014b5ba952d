"""What the command line says to a user's mistake: no traceback, exit code 2, and what mends it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.cluster import machine
from hpctrain.common.errors import nearest
from hpctrain.common.run.directory import RUNS
from hpctrain.control.horovod import check
from support import needs
from support.refusals import codes


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # So that none of these depends on what is built here; those that are about it say so.
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)


def test_a_script_whose_name_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / os.fsdecode(b"train\xff.py")
    script.touch()
    assert main(["run", str(script), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-plan-not-utf8"] and "train\\udcff.py" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "digit"], "error[HT-recipe-unknown]: unknown recipe 'digit'\n  did you mean 'digits'?"),
        (["run", "digits", "--set", "optimizer.lerning_rate=1"], "did you mean 'learning_rate'?"),
        (["run", "digits", "--set", "epochs=many"], "--set epochs=many: epochs: input should be a valid integer"),
        (["run", "digits", "-np", "0"], "-np 0: a run needs at least one rank"),
        pytest.param(["run", "digits", "--backend", "nccl2"], "HT-choice-unknown", marks=needs.pytorch),
        pytest.param(["run", "digits", "-np", "2", "--backend", "single"], "HT-backend-unfit", marks=needs.pytorch),
        (["run", "digits", "-np", "3", "--mesh", "dp_shard=2"], "the mesh dp_shard 2 = 2 does not divide 3 ranks"),
        (["submit", "digits", "--cluster", "cpu", "--dry-run", "--mesh", "tp"], "'tp' is not of the form AXIS=RANKS"),
        # Whether there is a Slurm to ask or not.
        (
            ["submit", "digit", "--dry-run"],
            "error[HT-recipe-unknown]: unknown recipe 'digit'\n  did you mean 'digits'?",
        ),
        (["plan", "digits", "-np", "2", "--mesh", "dp=2"], "'dp_replicate' or 'dp_shard'"),
        (["run", "digits", "--", "--lr", "3"], "HT-option-not-usable-here"),
        (["run", "train.py"], "cannot read train.py: No such file"),
        (["run", "mine.yaml"], "cannot read the recipe mine.yaml"),
        (["run", f"{'n' * 300}.py"], "File name too long"),
        *(
            (["verify", *wrong], said)
            for *wrong, said in (
                ("HT-argument-missing",),
                ("digits", "--plan", "plan.json", "HT-argument-missing"),
                ("--plan", "plan.json", "cannot read plan.json"),
                ("digits", "-np", "0", "greater than or equal to 1"),
                ("digits", "-np", "1", "HT-ranks-too-few"),
                ("digits", "--run-dir", "/", "HT-run-directory-taken"),
            )
        ),
        (["run"], "HT-argument-missing"),
        (["rum"], "there is no command 'rum'\n  did you mean 'run'? valid: "),
        (["train.py", "-np", "2"], "there is no command 'train.py'\n  hpctrain run train.py"),
        (["digits"], "there is no command 'digits'\n  hpctrain run digits"),
    ],
)
def test_misuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    # Typer wraps its own messages into a box.
    assert said in captured.err or said in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert captured.out == "" or "--json" in arguments


@needs.pytorch
def test_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    few = replace(machine.this_machine(), host="n1", cores=2, processors=4)
    monkeypatch.setattr("hpctrain.control.supervision.begin.this_machine", lambda: few)
    assert main(["run", "digits", "-np", "5", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-ranks-too-many"] and "n1" in said and "(4 hardware" in said
    assert "-np 2" in said and "--oversubscribe" in said
    # As many as hardware threads are slow, and no more than a warning; whoever counts slots has counted.
    Path("hosts").write_text("n1 slots=5\n")
    for allowed in (["-np", "4"], ["-np", "5", "--oversubscribe"], ["--hosts", "n1:5"], ["--hostfile", "hosts"]):
        assert main(["run", "digits", *allowed, "--dry-run"]) == 0
    assert main(["plan", "digits", "-np", "5"]) == 0
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert main(["run", "digits", "-np", "5", "--dry-run"]) == 0


@needs.pytorch
def test_horovod_that_is_not_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hpctrain.control.supervision.start.require", check.require)
    monkeypatch.setattr(check, "find_installed", lambda: None)
    for dry_run in ([], ["--dry-run"]):
        assert main(["run", "digits", "-np", "2", "--backend", "horovod", *dry_run]) == 2
        said = capsys.readouterr().err
        assert codes(said) == ["HT-backend-unavailable"] and "horovod build" in said
    Path("train.py").touch()
    assert main(["run", "train.py", "-np", "2", "--backend", "horovod"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-backend-unavailable"]
    assert not RUNS.exists()
    for others in (["-np", "1"], ["-np", "2"], ["-np", "2", "--backend", "gloo"]):
        assert main(["run", "digits", *others, "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "train.py", "--epochs", "3"], "train.py -- --epochs"),
        (["run", "train.py", "-n", "2"], "-np N"),
        (["submit", "digits", "--nnodes", "2"], "--nodes N"),
        (["submit", "train.py", "-np", "8"], "--tasks-per-node"),
        (["predict", "digits", "-np", "8"], "--gpus-per-node"),
        (["plan", "digits", "--bakcend", "mpi"], "'--backend'"),
        (["submit", "digits", "--batch-size", "3"], "--set KEY=VALUE"),
    ],
)
def test_an_option_that_is_none_of_these(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-option-unknown"] and words in said
    _, _, valid = said.partition("valid: ")
    assert all(option.startswith("-") for option in valid.split(", ") if valid)


def test_a_folder_is_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    Path("hpctrain-runs/one").mkdir(parents=True)
    Path("hpctrain-runs/one/plan.json").touch()
    for work, command in (
        ("photos", "data shard photos SHARDS"),
        ("hpctrain-runs/one", "--resume --run-dir hpctrain-runs/one"),
    ):
        for options in ([], ["--resume"]):
            assert main(["run", work, *options]) == 2
            said = capsys.readouterr().err
            assert codes(said) == ["HT-work-not-a-script"] and command in said


def test_what_begins_like_a_choice_is_meant_first() -> None:
    assert nearest("h100", ["h100-pcie", "h100-sxm", "p100"]).startswith("did you mean 'h100-pcie' or 'h100-sxm'?")
    assert nearest("h10", ["h20", "p100"]).startswith("did you mean 'h20'?")
    assert nearest("", ["a", "b"]) == "valid: a, b"
