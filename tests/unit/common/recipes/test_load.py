"""Recipe files and overrides: what is taken, and what is said about what is not."""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hpctrain.cli.main import main
from hpctrain.cli.recipes import list_row, list_table
from hpctrain.common.files.checked_yaml import subsection
from hpctrain.common.recipes.entries import load_entry, recipe_names
from hpctrain.common.recipes.keys import CheckedSection, kinds_of
from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.report.summary import reported_rows, reported_text, result_name, row_text
from support.refusals import refused

DIGITS = (resources.files("hpctrain.common.recipes") / "digits.yaml").read_text()


def recipe_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def changed(folder: Path, old: str, new: str) -> str:
    assert old in DIGITS
    return recipe_file(folder, DIGITS.replace(old, new))


def test_published_recipes_are_valid() -> None:
    assert "digits" in recipe_names()
    for name in recipe_names():
        entry = load_entry(name)
        assert entry.name.partition("@")[0] == name
        assert entry.source and entry.reported


def test_a_recipe_of_ones_own_names_no_source(tmp_path: Path) -> None:
    begin, end = DIGITS.index("source:"), DIGITS.index("model:")
    own = load_recipe(recipe_file(tmp_path, DIGITS[:begin] + DIGITS[end:])).at(1)
    assert (own.source, own.reported) == ("", ())
    assert result_name(own) == "test_accuracy"
    assert not reported_rows(own) and reported_text(own)
    assert list_row(own)["reported"] == []
    assert list_table([own]).row_count == 1


def test_overrides() -> None:
    recipe = load_recipe(
        "digits",
        [
            "optimizer={name: adam, learning_rate: 2e-3}",
            "optimizer.clip_norm=1",
            "schedule.name=step",
            "schedule.milestones=[5, 7.5]",
            "epochs=10",
        ],
    )
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate, recipe.optimizer.momentum) == ("adam", 0.002, 0.0)
    assert recipe.optimizer.clip_norm == 1.0
    assert recipe.schedule.milestones == (5.0, 7.5)
    assert recipe.epochs == 10
    assert recipe.batch == load_recipe("digits").batch


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        ("optimizer.learnin_rate=1", "HT-file-unknown-key", {"key": "optimizer.learnin_rate"}),
        ("optimzer.name=adam", "HT-file-unknown-key", {"key": "optimzer"}),
        ("epochs=2.5", "HT-file-value", {"key": "epochs", "value": "2.5"}),
        ("optimizer.learning_rate=.inf", "HT-file-value", {"key": "optimizer.learning_rate", "value": "inf"}),
        ("schedule.milestones=[1, x]", "HT-file-value", {"key": "schedule.milestones.1", "value": "'x'"}),
        (
            "optimizer.name=adam",
            "HT-recipe-key-of-another",
            {"key": "momentum", "owners": "sgd, lars and rmsprop_to_sgd", "name": "adam"},
        ),
        ("epochs.of=3", "HT-set-unknown-key", {"override": "epochs.of=3", "parent": "epochs"}),
        ("epochs", "HT-option-bad-value", {"override": "epochs"}),
        ("schedule.base_batch=null", "HT-keys-not-together", {"key": "schedule"}),
        ("schedule.warmup_epochs=21", "HT-keys-not-together", "warmup_epochs (21)"),
        ("schedule={name: step, milestones: [5, 20]}", "HT-keys-not-together", "milestones (20)"),
        ("schedule={name: triangular, peak_epoch: 20, warmup_from: 0}", "HT-keys-not-together", "peak_epoch (20)"),
        ("schedule={name: polynomial, end_rate: 0.1}", "HT-keys-not-together", "optimizer.learning_rate (0.025)"),
        ("schedule.end_rate=0.06", "HT-keys-not-together", "scaled to batch.size 64 (0.05)"),
        ("epochs=100001", "HT-file-value", {"key": "epochs", "value": "100001"}),
        (
            "model.batch_norm.span=8",
            "HT-recipe-key-of-another",
            {"key": "batch_norm", "owners": "resnet18, resnet50 and resnet101", "name": "digits_cnn"},
        ),
        (
            "schedule.milestones=[3]",
            "HT-recipe-key-of-another",
            {"key": "milestones", "owners": "step and piecewise", "name": "cosine"},
        ),
        ("images.size_ramp=[[4, 160], [4, 192]]", "HT-keys-not-together", {"key": "images"}),
        ("images.crop_area=[0.5, 0.1]", "HT-keys-not-together", {"key": "images"}),
        ("images.crop_ratio=[2, 1]", "HT-keys-not-together", {"key": "images"}),
        ("images.test_size=300", "HT-keys-not-together", {"key": "images"}),
        ("model.batch_norm.span=0", "HT-file-value", {"key": "model.batch_norm.span.constrained-int", "value": "0"}),
    ],
)
def test_a_wrong_override(override: str, code: str, values: dict[str, object] | str) -> None:
    words, named = ([values], {"key": "the recipe"}) if isinstance(values, str) else ([], values)
    if code == "HT-file-value":
        named = {"where": f"--set {override}", **named}
    with refused(code, *words, **named) as caught:
        load_recipe("digits", [override])
    assert caught.value.exit_code == 2


def test_the_nearest_key_is_proposed() -> None:
    for override, key in (("optimizer.learnin_rate=1", "learning_rate"), ("optimzer.name=adam", "optimizer")):
        with refused("HT-file-unknown-key") as caught:
            load_recipe("digits", [override])
        assert f"{key!r}?" in caught.value.message
    with refused("HT-recipe-unknown", name="digit") as caught:
        load_recipe("digit")
    assert "'digits'?" in caught.value.hint


def test_a_rate_that_ends_above_its_peak_on_these_ranks() -> None:
    recipe = load_recipe("digits", ["batch={per_rank: 8}", "schedule.end_rate=0.01"])
    assert recipe.at(2).global_batch == 16
    with refused("HT-keys-not-together", "(0.01)", "(0.00625)"):
        recipe.at(1)


@pytest.mark.parametrize(
    ("old", "new", "line_of", "code", "values"),
    [
        ("momentum: 0.9", "momentun: 0.9", "momentun", "HT-file-unknown-key", {"key": "optimizer.momentun"}),
        ("epochs: 20", "epochs: twenty", "epochs: twenty", "HT-file-value", {"key": "epochs", "value": "'twenty'"}),
        ("  size: 64", "  micro_batch: 1", "batch:", "HT-keys-not-together", {"key": "batch"}),
        (
            "warmup_epochs: 2",
            "warmup_epochs: 40",
            "name: digits\n",
            "HT-keys-not-together",
            {"key": "the recipe"},
        ),
        ("seed: 7", "epochs: 7", "epochs: 7", "HT-file-key-twice", {"key": "epochs"}),
        ("seed: 7", "seed: [7", "", "HT-file-not-yaml", {}),
    ],
)
def test_a_wrong_file_names_the_line(
    tmp_path: Path, old: str, new: str, line_of: str, code: str, values: dict[str, object]
) -> None:
    file = changed(tmp_path, old, new)
    if line_of:
        text = Path(file).read_text()
        values = {"where": f"{file}:{text[: text.index(line_of)].count(chr(10)) + 1}", **values}
    with refused(code, **values):
        load_recipe(file)


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (["fault_tolerance=shrink"], "HT-file-value", {"key": "fault_tolerance"}),
        (["optimizer=3", "optimizer.name=sgd"], "HT-set-unknown-key", {"parent": "optimizer", "value": 3}),
        (["fault_tolerance.min_ranks=2"], "HT-keys-not-together", {}),
        (["checkpoints.every_steps=Auto"], "HT-value-not-valid", {"key": "checkpoints.every_steps", "value": "Auto"}),
        (["checkpoints.every_steps=0"], "HT-value-not-valid", {"key": "checkpoints.every_steps", "value": 0}),
        (["checkpoints.mtbf_hours=6"], "HT-keys-not-together", {"key": "checkpoints"}),
    ],
)
def test_what_does_not_go_together(overrides: list[str], code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        load_recipe("digits", overrides)


def test_fewer_epochs_than_the_warm_up_has_clip_it_and_say_so() -> None:
    recipe = load_recipe("digits", ["epochs=1"])
    assert (recipe.epochs, recipe.schedule.warmup_epochs) == (1, 1)
    (note,) = recipe.notes
    assert note.startswith("--set epochs=1: ") and "--set schedule.warmup_epochs=0" in note
    assert load_recipe("digits", ["epochs=2"]).notes == ()
    # Said of one change; and what was asked for is not changed.
    assert override_recipe(recipe, ["seed=3"]).notes == ()
    with refused("HT-keys-not-together"):
        load_recipe("digits", ["epochs=1", "schedule.warmup_epochs=2"])
    assert load_recipe("digits", ["epochs=1", "schedule.warmup_epochs=0"]).notes == ()
    with refused("HT-file-value", problem="input should be greater than or equal to 1", key="epochs"):
        load_recipe("digits", ["epochs=0"])


@pytest.mark.parametrize(
    ("name", "override", "other"),
    [
        ("you2017-lars@8192", "optimizer.learning_rate=29", True),
        ("you2017-lars@8192", "schedule.decay_from=warmup", True),
        ("you2017-lars@8192", "model.weights.fan=in", True),
        ("you2017-lars@8192", "batch.micro_batch=32", True),
        ("you2017-lars@8192", "communication.compression=fp16", True),
        ("goyal2017", "batch.per_rank=64", True),
        # What leaves the result what it is, or has rows of its own.
        ("you2017-lars@8192", "optimizer.learning_rate=30", False),
        ("you2017-lars@8192", "data.path=/somewhere", False),
        ("you2017-lars@8192", "seed=3", False),
        ("you2017-lars@8192", "checkpoints.every_steps=10", False),
        ("you2017-lars@8192", "fault_tolerance.lost_rank=shrink", False),
        ("mlperf-resnet50@8192", "batch.micro_batch=32", False),
        ("goyal2017", "batch.emulated_ranks=256", False),
        ("digits-large-minibatch", "batch.size=256", False),
    ],
)
def test_reported_results_are_of_other_values_once_one_is_changed(name: str, override: str, other: bool) -> None:
    recipe = load_recipe(name, [override])
    assert {row.of_other_values for row in recipe.reported} == {other}
    assert [row.value for row in recipe.reported] == [row.value for row in load_recipe(name).reported]
    assert {"other values" in row_text(row) for row in recipe.reported} == {other}
    again = override_recipe(recipe, ["seed=5"])
    assert {row.of_other_values for row in again.reported} == {other}


def test_keys_of_kinds_exist() -> None:
    def check(section: type[BaseModel]) -> None:
        for key, field in section.model_fields.items():
            for mark in kinds_of(field):
                assert issubclass(section, CheckedSection), "the key would be taken for other kinds too"
                *path, decisive = mark.decisive.split(".")
                holder = functools.reduce(subsection, path, section)
                # A key's value may be one of some words or a number.
                values = get_args(holder.model_fields[decisive].annotation)
                words = {word for value in values for word in (get_args(value) or (value,))}
                assert {*mark.kinds.split()} <= words
            if inner := subsection(section, key):
                check(inner)

    check(Recipe)


def test_every_key_is_explained_and_has_its_place_in_the_schema_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)

    def check(section: type[BaseModel], found: dict[str, Any]) -> None:
        assert {*found["properties"]} - {"variants"} == {*section.model_fields}
        for key, field in section.model_fields.items():
            inner = subsection(section, key)
            assert field.description or (inner and inner.__doc__), f"{section.__name__}.{key} has no description"
            if inner:
                check(inner, schema["$defs"][inner.__name__])

    check(Recipe, schema)
