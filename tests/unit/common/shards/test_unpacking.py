"""Archives whose members would lead out of their folder, or are no files: nothing of them gets out."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.control.schedulers.slurm import node_files


def _file(name: str, content: bytes = b"new") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def _other(kind: bytes, name: str, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b""


def _escapes(outside: Path) -> dict[str, list[tuple[tarfile.TarInfo, bytes]]]:
    """By what they try: to write ``outside/old``, or a new file beside it."""
    return {
        "parent folders": [_file(f"../{outside.name}/new"), _file(f"a/../../{outside.name}/old")],
        "absolute name": [_file(f"{outside}/new"), _file(f"{outside}/old")],
        "through a symbolic link": [_other(tarfile.SYMTYPE, "link", f"../{outside.name}"), _file("link/old")],
        "through an absolute link": [_other(tarfile.SYMTYPE, "link", str(outside)), _file("link/new")],
        "over a symbolic link": [_other(tarfile.SYMTYPE, "link", f"{outside}/old"), _file("link")],
        "over a hard link": [_other(tarfile.LNKTYPE, "link", f"../{outside.name}/old"), _file("link")],
        "over an absolute hard link": [_other(tarfile.LNKTYPE, "link", f"{outside}/old"), _file("link")],
    }


def _write(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "old").write_text("old")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"old": "old"}


@pytest.mark.parametrize("case", _escapes(Path()))
def test_a_tar_that_a_job_stages_stays_in_its_folder(
    case: str, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _write(tmp_path / "data.tar", [_file("right"), *_escapes(outside)[case]])

    def here(*command: str | Path) -> bool:
        # tar complains of what it leaves out.
        subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, timeout=30, check=False)
        return True

    monkeypatch.setattr(node_files, "_on_each_node", here)
    copy = node_files.StagedPaths(source=str(archive), name="stage", kind="tar")
    assert node_files._copy(copy, tmp_path / "stage")
    assert (tmp_path / "stage" / "right").read_text() == "new"
