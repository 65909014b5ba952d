"""``hpctrain recipes``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpctrain.cli.main import main
from hpctrain.common.recipes.entries import all_entries
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.recipes.load import load_recipe
from support.refusals import codes


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, "80"])
def test_list(columns: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    entries = {entry.name: entry for entry in all_entries()}
    assert main(["recipes", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(entries)
    assert (rows["digits"]["model"], rows["digits"]["data"], rows["digits"]["epochs"]) == ("digits_cnn", "digits", 20)
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in entries:
        (line,) = (line for line in lines if line.startswith(f" {name} "))
        assert len(line) <= int(columns or 1000)
    assert [line.split()[1:] for line in lines if line.startswith((" digits ", " goyal2017 "))] == [
        ["digits_cnn", "64", "20", "0.975"],
        ["resnet50", "32", "a", "rank", "90", "0.6604", "to", "0.7652", "(10)"],
    ]


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
    said = capsys.readouterr().err
    assert codes(said) == ["HT-file-faults"] and "'epochs'" in said


@pytest.mark.slow
def test_check_looks_at_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "check", "mlperf-resnet50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"mlperf-resnet50@{name}" for name in MLPERF]
    assert lines[0] == "mlperf-resnet50@1632: ok"
    assert main(["recipes", "check", "mlperf-resnet50@8192"]) == 0
    assert capsys.readouterr().out == "mlperf-resnet50@8192: ok\n"
    assert main(["recipes", "check", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "digits", "status": "ok"}]
    file = tmp_path / "mine.yaml"
    assert main(["recipes", "show", "digits"]) == 0
    base = capsys.readouterr().out
    file.write_text(base + "variants:\n  a: {}\n  b: {epochs: x}\n  c: {seed: x}\n")
    assert main(["recipes", "check", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == f"digits@a: ok\n{file}@b: failed\n{file}@c: failed\n"
    assert "b: epochs" in said.err and "c: seed" in said.err
    file.write_text(base.replace("seed: 7", "seed: x") + "variants:\n  a: {}\n  b: {}\n")
    assert main(["recipes", "check", str(file)]) == 2
    assert capsys.readouterr().err.count("seed: ") == 1


MLPERF = [
    *("1632", "3264", "4096", "8192", "33280", "65536"),
    *("1632-v1", "3200", "20480", "32768-v1", "35840", "57344"),
]


def test_names_are_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "digits", "--set", "name='[red]$x$ [/y]'", "--world", "1"]) == 0
    assert "[red]$x$ [/y]: " in capsys.readouterr().out


def test_what_the_recipe_has_no_use_for_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "digits"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert "images" not in shown
    assert shown["data"] == {"name": "digits", "test_fraction": 0.2}
    assert shown["model"] == {"name": "digits_cnn"}
    assert (
        shown["optimizer"]["nesterov"] and "betas" not in shown["optimizer"] and "clip_norm" not in shown["optimizer"]
    )
    assert main(["recipes", "show", "goyal2017"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["images"]["size"] == 224 and shown["model"]["batch_norm"]["momentum"] == 0.9
    assert {"workers", "test_fraction"}.isdisjoint(shown["data"])


@pytest.mark.slow
def test_what_is_shown_of_any_recipe_is_that_recipe_again(tmp_path: Path) -> None:
    recipes = [*all_entries()]
    assert len(recipes) > 30
    # A value that was set stays, whether there is a use for it or not.
    recipes.append(load_recipe("digits", ["images.flip=false", "data.limit=10"]))
    for recipe in recipes:
        file = tmp_path / "shown.yaml"
        file.write_text(yaml.safe_dump(used_values(recipe)))
        assert load_recipe(str(file)) == recipe
