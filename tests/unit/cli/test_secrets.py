"""Secrets in the environment: they reach the ranks that are to have them, and no file and no terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.common.secrets import is_secret
from hpctrain.control.schedulers.profile import load_profile
from support import needs
from support.refusals import codes, refused

_NAMES = ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD", "SSH_KEY", "BASIC_AUTH")
_SECRETS = {name: f"hush-{number}-{name.lower()[::-1]}" for number, name in enumerate(_NAMES)}
_ENV = [word for name in _NAMES for word in ("--env", name)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in _SECRETS.items():
        monkeypatch.setenv(name, value)


def _told(text: str | bytes) -> set[str]:
    content = text.encode() if isinstance(text, str) else text
    return {name for name, value in _SECRETS.items() if value.encode() in content}


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _require_silence(folder: Path, printed: str) -> None:
    assert not _told(printed), printed
    leaks = {str(path): _told(content) for path, content in _files(folder).items() if _told(content)}
    assert not leaks


@pytest.mark.parametrize(
    "name",
    [
        *(*_NAMES, "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "api_key", "APIKEY", "API_KEYS", "TOKEN", "HF_TOKENS"),
        *("DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "HFTOKEN", "API_TOKEN_2", "ENCRYPTION_KEY_V2", "GITHUB_PAT_TOKEN"),
        *("DATABASE_URL", "REDIS_URL", "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK_URL", "SENTRY_DSN"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "PATH", "MONKEY", "AUTHOR", "PWD", "BYPASS", "COMPASS"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "MLFLOW_TRACKING_URI", "MASTER_ADDR", "SLURM_JOB_ID"),
        *("HTTP_PROXY_PORT", "OMP_NUM_THREADS", "PASSES", "SSH_AUTH_SOCK"),
    ],
)
def test_names_of_other_variables(name: str) -> None:
    assert not is_secret(name)


def test_the_ranks_get_them_and_a_failure_tells_none(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(
        f"import os\nassert all(len(os.environ[name]) > 9 for name in {_NAMES!r})\nraise SystemExit('all there')\n"
    )
    assert main(["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", "run", *_ENV]) == 1
    printed = capfd.readouterr()
    assert "all there" in printed.err + printed.out
    _require_silence(Path(), printed.out + printed.err)


@pytest.mark.parametrize("backend", ["single", pytest.param("mpi", marks=needs.mpirun)])
def test_a_dry_run_tells_none(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = "1" if backend == "single" else "2"
    assert main(["run", "digits", "--backend", backend, "-np", ranks, "--dry-run", *_ENV]) == 0
    printed = capfd.readouterr()
    assert not _told(printed.out + printed.err)
    # By its name, for mpirun to take it from its own environment.
    assert ("-x WANDB_API_KEY" in printed.out) == (backend == "mpi")


@needs.pytorch
def test_a_job_tells_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    submit = ["submit", "digits", "--cluster", "generic", "--nodes", "2", *_ENV]
    assert main([*submit, "--dry-run"]) == 0
    assert main([*submit, "--run-dir", "run"]) == 0
    printed = capfd.readouterr()
    assert {"plan.json", "job.sh", "submission.json"} <= {path.name for path in Path("run").iterdir()}
    _require_silence(Path(), printed.out + printed.err)


def test_a_secret_that_is_gone_is_asked_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("raise SystemExit(1)\n")
    assert main(["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", "run", *_ENV]) == 1
    capfd.readouterr()
    monkeypatch.delenv("HF_TOKEN")
    assert main(["run", "--resume", "--run-dir", "run"]) == 2
    said = capfd.readouterr().err
    assert codes(said)[-1] == "HT-variable-not-set" and "HF_TOKEN" in said


def test_a_secret_on_the_command_line_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--env", "HF_TOKEN=hush-hush"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-secret-exposed"] and "--env HF_TOKEN" in said and "hush-hush" not in said


@pytest.mark.slow
@pytest.mark.parametrize("address", ["https://me:hush-hush@host/x", "postgresql://hush-hush@host"])
def test_an_address_with_a_password_is_a_secret(
    address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "digits", "--env", f"PLACE={address}"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-secret-exposed"] and "--env PLACE" in said and "hush-hush" not in said
    monkeypatch.setenv("PLACE", address)
    Path("train.py").write_text("import os; assert 'hush' in os.environ['PLACE']\n")
    assert main(["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", "run", "--env", "PLACE"]) == 0
    assert read_model(RunDirectory(Path("run")).plan, Plan).start.passed == ("PLACE",)
    printed = capfd.readouterr()
    assert "hush" not in printed.out + printed.err
    assert not [path for path, content in _files(Path("run")).items() if b"hush" in content]


def test_a_secret_in_a_profile_is_refused() -> None:
    Path("own.yaml").write_text("name: own\nsource: here\nenvironment:\n  HF_TOKEN: hush-hush\n")
    with refused("HT-secret-exposed", name="HF_TOKEN") as caught:
        load_profile("./own.yaml")
    assert "hush-hush" not in str(caught.value)
