"""Submitting, with stand-ins for Slurm's programs: all of a run's directory, or nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RUNS
from hpctrain.common.run.plan import Plan
from support import needs
from support.refusals import codes
from support.schedulers.fake_programs import Programs

COUNT = "count = sum(1 for line in open({notes!r})); print(f'{{100 + count}};cluster')"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs(tmp_path / "bin")
    made.folder.mkdir()
    made.add("sbatch", COUNT.format(notes=str(made.folder / "notes")))
    made.add("scancel")
    made.add("squeue")
    monkeypatch.setenv("PATH", made.environment["PATH"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return made


def submit(*arguments: str) -> int:
    return main(["submit", *arguments])


@needs.pytorch
def test_the_directory_holds_plan_script_and_submission(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("digits", "--cluster", "generic", "--nodes", "3", "--tasks-per-node", "2", "--set", "epochs=2")
    assert submit(*asked, "--env", "A=b c", "--interface", "ib0") == 0
    path, job = capsys.readouterr().out.splitlines()
    directory = Path(path)
    assert directory.is_absolute() and directory.parent == tmp_path / "here" / RUNS
    plan = Plan.model_validate_json((directory / "plan.json").read_bytes())
    assert (plan.ranks, plan.hosts, plan.start.environment) == (6, (), {"A": "b c"})
    assert plan.recipe and plan.recipe.epochs == 2
    assert plan.host_options.interface == "ib0"
    # The ranks have to be gone, and the job requeued, before the limit.
    assert plan.stop.seconds == 96
    (call,) = programs.calls("sbatch")
    assert call.arguments == ["--parsable", f"--chdir={directory}", f"{directory}/job.sh"]
    submission = json.loads((directory / "submission.json").read_text())
    assert (submission["jobs"], submission["cluster"]) == ([job], "generic")
    assert json.loads((directory / "job.json").read_text())["request"]["nodes"] == 3
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (directory / "logs").is_dir()


@needs.pytorch
def test_the_job_of_ranks_that_heal_outlives_a_node(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    for word, lines in (("shrink", 1), ("stop", 0)):
        assert (
            submit("digits", "--cluster", "generic", "--nodes", "2", "--set", f"fault_tolerance.lost_rank={word}") == 0
        )
        script = Path(capsys.readouterr().out.split()[0], "job.sh").read_text()
        assert script.splitlines().count("#SBATCH --no-kill") == lines
    assert (
        submit("digits", "--cluster", "generic", "--set", "fault_tolerance.lost_rank=shrink", "--launcher", "srun-pmix")
        == 2
    )
    assert codes(capsys.readouterr().err) == ["HT-shrink-not-possible"]
    assert len(programs.calls("sbatch")) == 2


@needs.pytorch
def test_a_job_waits_for_the_jobs_that_the_user_names(programs: Programs) -> None:
    assert submit("digits", "--cluster", "generic", "--dependency", "afterok:5") == 0
    (call,) = programs.calls("sbatch")
    assert call.arguments[1:-2] == ["--dependency=afterok:5"]


@needs.pytorch
def test_what_sbatch_refuses_leaves_nothing_behind(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.add("sbatch", "sys.exit('sbatch: error: Invalid qos')")
    assert submit("digits", "--cluster", "generic") == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-job-refused"] and "Invalid qos" in said
    assert not RUNS.exists()
    assert programs.calls("scancel") == []


@needs.pytorch
def test_a_job_whose_record_cannot_be_written_is_cancelled(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise HpctrainError("HT-disk-full", "no room")

    monkeypatch.setattr("hpctrain.control.schedulers.job_script.record", full)
    assert submit("digits", "--cluster", "generic") == 2
    assert codes(capsys.readouterr().err) == ["HT-disk-full"]
    assert [call.arguments for call in programs.calls("scancel")] == [["101"]]
    assert not RUNS.exists()
    # The directory goes where nothing can be cancelled either.
    (programs.folder / "scancel").unlink()
    assert submit("digits", "--cluster", "generic") == 2
    assert not RUNS.exists()


def test_a_folder_that_was_there_keeps_what_was_in_it(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.add("sbatch", "sys.exit(1)")
    place = Path("place")
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    assert submit("digits", "--cluster", "generic", "--run-dir", "place") == 2
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["code", "code.diff"])
def test_what_has_the_name_of_the_copy_of_the_code_is_kept(
    programs: Programs, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A link too, behind which nothing is written."""
    for folder in ("place", "elsewhere"):
        Path(folder).mkdir()
    Path("place", name).symlink_to("../elsewhere")
    Path("train.py").write_text("")
    assert submit("train.py", "--cluster", "generic", "--nodes", "1", "--run-dir", "place") == 2
    assert codes(capsys.readouterr().err) == ["HT-run-directory-taken"]
    assert list(Path("elsewhere").iterdir()) == [] and len(list(Path("place").iterdir())) == 1


@needs.pytorch
def test_a_run_is_not_submitted_over_another(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    for code in (0, 2):
        assert submit("digits", "--cluster", "generic", "--run-dir", "place") == code
    assert codes(capsys.readouterr().err) == ["HT-run-directory-taken"]
    assert Path("place/plan.json").exists()
    assert len(programs.calls("sbatch")) == 1


def test_a_dry_run_prints_the_script_and_writes_nothing(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("digits", "--cluster", "generic", "--nodes", "2", "--dry-run", "--env", "A=b") == 0
    script = capsys.readouterr().out
    assert script.splitlines()[:2] == ["#!/bin/bash", "#SBATCH --job-name=digits"]
    # Whoever redirects stdout has a script.
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True).stderr == ""
    assert list(Path.cwd().iterdir()) == []
    assert programs.calls("sbatch") == []


@needs.pytorch
def test_variables_of_the_user_do_not_change_what_is_asked(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    assert submit("digits", "--cluster", "generic") == 0
    (call,) = programs.calls("sbatch")
    assert "SBATCH_PARTITION" not in call.environment and "PATH" in call.environment


@needs.pytorch
def test_a_dry_run_needs_no_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert submit("digits", "--cluster", "generic", "--dry-run") == 0
    assert submit("digits", "--cluster", "generic") == 2
    assert codes(capsys.readouterr().err) == ["HT-program-not-found"]
    assert not RUNS.exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--cluster", "nowhere"], "HT-choice-unknown"),
        (["--mount", "/a"], "HT-option-needs-another"),
        (
            ["--container", "x", "--container-runtime", "pyxis", "--launcher", "mpirun"],
            "HT-launcher-not-usable-here",
        ),
        (["--container", "nosuch.sif"], "HT-container-image-missing"),
        (["--container", "/nosuch.sqsh", "--container-runtime", "pyxis"], "HT-container-image-missing"),
        (["--env", "1=2"], "HT-option-bad-value"),
        (["--", "x"], "HT-option-not-usable-here"),
    ],
)
def test_misuse(arguments: list[str], code: str, programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = [] if "--cluster" in arguments else ["--cluster", "generic"]
    assert submit("digits", *cluster, *arguments) == 2
    assert codes(capsys.readouterr().err) == [code]
    assert programs.calls("sbatch") == []
    assert not RUNS.exists()


@pytest.mark.long
@needs.pytorch
def test_submitting_loads_only_what_it_needs(programs: Programs) -> None:
    """Its time is a matter of what is imported; the slow ones are not."""
    program = (
        "import sys; from hpctrain.cli.main import main; code = main(['submit', 'digits', '--cluster', 'generic']); "
        "print(code, sorted({'matplotlib', 'networkx', 'ClusterShell', 'tensorboard'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("name", ["100%", "a\\b", os.fsdecode(b"run-\xff")])
@needs.pytorch
def test_a_path_that_slurm_cannot_log_to_is_refused(
    name: str, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry-run"]):
        assert submit("digits", "--cluster", "generic", "--run-dir", name, *more) == 2
        assert codes(capsys.readouterr().err) == ["HT-run-directory-unfit"]
    assert not Path(name).exists() and programs.calls("sbatch") == []
