"""``hpctrain submit`` to Kubernetes: what goes to kubectl, and what is refused with the words that mend it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from support.refusals import codes

# In place of kubectl: keeps what it was given, and refuses jobs of some names as kubectl does.
KUBECTL = """\
#!{python}
import json, sys
given = sys.stdin.read()
with open({notes!r}, "a") as file:
    print(json.dumps([sys.argv[1:], given]), file=file)
if "kind: Job" in given and "name: barred" in given:
    sys.exit('Error from server (Forbidden): error when creating "STDIN": jobs.batch "barred" is forbidden')
if "name: taken" in given:
    sys.exit('Error from server (AlreadyExists): error when creating "STDIN": jobs.batch "taken" already exists')
print("job.batch/digits created")
"""
SUBMIT = ["submit", "digits", "--cluster", "kubernetes", "--container", "hpctrain:test", "--job-name", "digits"]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for kubectl, the only program on the PATH, writes its arguments and what it read."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "kubectl"
    path.write_text(KUBECTL.format(python=sys.executable, notes=str(tmp_path / "notes")))
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "notes"


def test_a_dry_run_prints_manifests_and_nothing_else(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SUBMIT, "--nodes", "2", "--dry-run"]) == 0
    printed = capsys.readouterr()
    kinds = [each["kind"] for each in yaml.safe_load_all(printed.out)]
    assert kinds == ["ConfigMap", "Service", "Job"]
    assert not notes.exists() and list(notes.parent.iterdir()) == [notes.parent / "bin"]


def test_kubectl_gets_what_the_dry_run_prints(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "3", "--set", "epochs=2", "--time", "90", "--env", "A=it's"]
    assert main([*SUBMIT, *options, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert main([*SUBMIT, *options]) == 0
    calls = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [arguments for arguments, _ in calls] == [["create", "-f", "-"]] * 2
    given = "".join(text if text.startswith("---") else f"---\n{text}" for _, text in calls)
    assert [*yaml.safe_load_all(given)] == [*yaml.safe_load_all(shown)]
    printed = capsys.readouterr()
    assert printed.out == "/hpctrain/hpctrain-runs/digits\njob/digits\n"
    assert "logs -f" in printed.err and "-l app.kubernetes.io/instance=digits" in printed.err
    assert "-n default" in printed.err
    configuration, _, job = yaml.safe_load_all(given)
    plan = Plan.model_validate_json(configuration["data"]["plan.json"])
    assert plan.recipe is not None and plan.recipe.epochs == 2
    assert (plan.ranks, plan.start.environment) == (24, {"A": "it's"})
    assert job["spec"]["activeDeadlineSeconds"] == 90 * 60


def test_a_job_that_the_cluster_refuses(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SUBMIT[:-1], "barred"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-job-refused"] and "is forbidden" in said
    # What was created for the job before it was refused is gone again.
    calls = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [arguments[0] for arguments, _ in calls] == ["create", "create", "delete"]
    assert calls[2][1] == calls[0][1]


def test_submitted_again_a_run_goes_on_in_the_pods_of_the_new_job(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    for name, nodes in (("one", "2"), ("two", "2"), ("three", "3")):
        assert main([*SUBMIT[:-1], name, "--nodes", nodes, "--dry-run"]) == 0
        configuration, *_ = yaml.safe_load_all(capsys.readouterr().out)
        plans.append(tmp_path / f"{name}.json")
        plans[-1].write_text(configuration["data"]["plan.json"])
    directory = RunDirectory(tmp_path / "run")
    directory.create(Plan.model_validate_json(plans[0].read_text()))
    monkeypatch.setenv("HPCTRAIN_POD", "digits")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    ports = set()
    for path, ranks in zip(plans, (16, 16, 24), strict=True):
        assert main(["run", "--resume", "--run-dir", str(directory.path), "--plan", str(path), "--dry-run"]) == 0
        shown = capsys.readouterr().out
        (port,) = re.findall(rf"--rdzv-endpoint={path.stem}-0.{path.stem}:(\d+) ", shown)
        assert 20000 <= int(port) < 30000
        ports.add(port)
        assert f"--nnodes={ranks // 8}" in shown.replace("--nnodes ", "--nnodes=")
    assert len(ports) == 1, "it is the run's, so that all pods come to it"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "gpu"], "HT-option-not-usable-here"),
        (["--wait"], "HT-option-not-usable-here"),
        (["--launcher", "mpirun"], "HT-option-not-usable-here"),
        (["--fabric", "f.txt"], "HT-option-not-usable-here"),
        (["--mount", "/data"], "HT-option-not-usable-here"),
        (["--sbatch", "mail-type=END"], "HT-option-not-usable-here"),
        (["--run-dir", "hpctrain-runs/one"], "HT-run-directory-unfit"),
        (["--backend", "gloo", "--framework", "keras"], "HT-backend-unfit"),
        (["--env", "MY_TOKEN"], "HT-secret-exposed"),
    ],
)
def test_misuse(
    notes: Path,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    assert main([*SUBMIT, *options, "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    assert not notes.exists()
