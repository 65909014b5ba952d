"""``hpctrain recipes``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.recipes.difference import differences
from hpctrain.recipes.entries import Listed, all_entries
from hpctrain.recipes.load import load_recipe


def test_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    entries = {entry.name: entry for entry in all_entries()}
    assert main(["recipes", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(entries)
    assert (rows["digits"]["model"], rows["digits"]["data"], rows["digits"]["epochs"]) == ("digits_cnn", "digits", 20)
    assert {name for name, row in rows.items() if row["missing"]} == {
        name for name, entry in entries.items() if isinstance(entry, Listed)
    }
    assert main(["recipes", "list"]) == 0
    runnable, _, others = capsys.readouterr().out.partition("cannot be run: missing")
    for name, entry in entries.items():
        assert f" {name} " in (others if isinstance(entry, Listed) else runnable)
    assert "0.975" in next(line for line in runnable.splitlines() if " digits " in line)


def test_differences(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changed = load_recipe("digits", ["epochs=3", "schedule.warmup_epochs=1", "name=mine"]).model_dump(mode="json")
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(changed))
    assert main(["recipes", "show", "--diff", "digits", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "epochs": {"digits": 20, "mine": 3},
        "schedule.warmup_epochs": {"digits": 2, "mine": 1},
    }
    assert main(["recipes", "show", "--diff", "digits", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[0] == ["digits", "mine"]
    assert rows[2:] == [["schedule.warmup_epochs", "2.0", "1.0"], ["epochs", "20", "3"]]
    assert main(["recipes", "show", "--diff", "digits", str(file), "--world", "2"]) == 2
    assert "--diff A B shows how two recipes differ" in capsys.readouterr().err


def test_a_section_that_one_lacks_differs_key_by_key() -> None:
    jitter = "images.jitter={brightness: 0.4}"
    assert differences(load_recipe("digits"), load_recipe("digits", [jitter]))["images.jitter.brightness"] == (
        None,
        0.4,
    )


def test_recipe_that_cannot_be_run_is_shown_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(entry.name for entry in all_entries() if isinstance(entry, Listed))
    assert main(["recipes", "show", name]) == 0
    assert "missing:\n- " in capsys.readouterr().out
    assert main(["recipes", "show", name, "--world", "8"]) == 2
    assert f"{name} cannot be run" in capsys.readouterr().err


def test_what_is_shown_is_a_recipe_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "digits", "--set", "epochs=3"]) == 0
    file = tmp_path / "shown.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_recipe(str(file)) == load_recipe("digits", ["epochs=3"])
    assert main(["recipes", "show", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load_recipe("digits").model_dump(mode="json")


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "check", "digits"]) == 0
    assert capsys.readouterr().out == "digits: ok\n"
    file = tmp_path / "bad.yaml"
    file.write_text("name: x\n")
    assert main(["recipes", "check", str(file)]) == 2
    assert "the key 'epochs' is missing" in capsys.readouterr().err
