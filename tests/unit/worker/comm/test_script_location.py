"""Where a script was, when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.worker.comm import script_location


def test_a_script_may_have_removed_the_folder_in_which_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(script_location, "_left", [])
    folder.rmdir()
    trace = None
    try:
        exec(compile("raise SystemExit(0)", "/of/a/user.py", "exec"), {})
    except SystemExit as raised:
        trace = raised.__traceback__
    script_location.note_exit(trace)
    assert script_location.left_at() == ", which it left at /of/a/user.py:1"
