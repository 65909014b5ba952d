from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.run.verified_scripts import note_script


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "train.py"
    path.write_text("1")
    return path


def test_a_script_is_new_once_by_its_content_and_by_its_place(script: Path) -> None:
    assert [note_script(script) for _ in range(2)] == [True, False]
    script.write_text("2")
    assert not note_script(script)
    moved = script.rename(script.with_name("moved.py"))
    assert not note_script(moved)
    moved.with_name("other.py").write_text("3")
    assert note_script(moved.with_name("other.py"))


def test_the_file_forgets_the_oldest(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.common.run.verified_scripts._MOST", 4)
    for number in range(5):
        path = script.with_name(f"{number}.py")
        path.write_text(str(number))
        assert note_script(path)
    (file,) = (script.parent / "state" / "hpctrain").iterdir()
    assert len(file.read_text().split()) == 4
    assert not note_script(path)
    assert note_script(script.with_name("0.py"))


@pytest.mark.parametrize("content", [b"\xff", None])
def test_what_cannot_be_read_or_written_fails_nothing(script: Path, content: bytes | None) -> None:
    state = script.parent / "state"
    if content is None:
        state.touch()
    else:
        (state / "hpctrain").mkdir(parents=True)
        (state / "hpctrain" / "verified-scripts").write_bytes(content)
    assert not note_script(script)
    assert not note_script(script.with_name("none.py"))
