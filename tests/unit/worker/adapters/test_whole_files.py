"""Files that several ranks save under one name are whole at any moment."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

from hpctrain.worker.adapters.script_libraries import _whole, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link.pt"
    link.symlink_to(target)
    with replacing(link) as path:
        path.write_text("new")
        assert (path.name, target.read_text()) == ("model.pt", "old")
    assert (target.read_text(), target.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    with pytest.raises(ValueError), replacing(target) as path:
        path.write_text("half")
        raise ValueError
    assert target.read_text() == "new"
    assert {each.name for each in tmp_path.iterdir()} == {"link.pt", "model.pt"}


def test_paths_are_replaced_and_other_places_left_to_the_library(tmp_path: Path) -> None:
    file, saved = io.BytesIO(), torch.ones(2)
    save = _whole(torch.save, "f")
    save(saved, file)
    save(saved, f=tmp_path / "a.pt")
    _whole(lambda f: Path(f).write_text("a"), "f")(os.devnull)
    file.seek(0)
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True), torch.load(file, weights_only=True))
    with pytest.raises(RuntimeError):
        save(saved, tmp_path / "no" / "a.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]
