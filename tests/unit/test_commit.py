"""What `hpctrain --version` says of the commit in a checkout; tests/unit/test_build.py has what is built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.commit import of_checkout


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--message", "one")
    return tmp_path


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    assert of_checkout(checkout) == git(checkout, "rev-parse", "HEAD")[:12]


def test_a_tag_is_no_commit(checkout: Path) -> None:
    git(checkout, "tag", "v1")
    assert of_checkout(checkout) == git(checkout, "rev-parse", "HEAD")[:12]


def test_changed_files_are_told(checkout: Path) -> None:
    (checkout / "file").write_text("two\n")
    assert of_checkout(checkout) == f"{git(checkout, 'rev-parse', 'HEAD')[:12]}-dirty"


def test_a_folder_within_somebody_elses_checkout_has_no_commit(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert of_checkout(checkout / "site-packages") is None


def test_the_repository_of_a_hook_is_another_one(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, other = git(checkout, "rev-parse", "HEAD"), tmp_path_factory.mktemp("other")
    git(other, "init")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert of_checkout(checkout) == commit[:12]


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert of_checkout(checkout) is None


def test_a_checkout_without_commits_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert of_checkout(tmp_path) is None
