"""The source package is taken only with the hash that is pinned."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import source

SETUP = b"from setuptools import setup\nsetup(name='horovod', version='0.28.1')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that holds another horovod-0.28.1.tar.gz than the real one."""
    path = tmp_path / "an index" / "horovod-0.28.1.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("horovod-0.28.1/setup.py")
        member.size = len(SETUP)
        archive.addfile(member, io.BytesIO(SETUP))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", path.parent.as_uri())
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "a build"
    directory.mkdir()
    return directory


@pytest.mark.slow
def test_a_package_with_another_hash_is_refused(package: Path, place: Path) -> None:
    with pytest.raises(HpctrainError) as error:
        source.fetch(place)
    assert "HASHES" in error.value.message
    assert error.value.exit_code == 1
    assert not (place / "horovod-0.28.1").exists()


@pytest.mark.long
def test_a_package_with_the_pinned_hash_is_unpacked(
    package: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    assert (source.fetch(place) / "setup.py").read_bytes() == SETUP


@pytest.mark.slow
def test_an_index_without_the_package_says_what_to_look_at(package: Path, place: Path) -> None:
    package.unlink()
    with pytest.raises(HpctrainError, match="could not download horovod") as error:
        source.fetch(place)
    assert "pip config list" in error.value.hint
