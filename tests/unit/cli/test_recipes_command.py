"""``hpctrain recipes``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.recipes.load import load_recipe


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    assert "digits" in capsys.readouterr().out
    assert main(["recipes", "list", "--json"]) == 0
    assert {"digits"} <= {row["name"] for row in json.loads(capsys.readouterr().out)}


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
