"""Variants of a recipe file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.entries import all_entries, load_entry, recipe_names, variant_names
from hpctrain.common.recipes.load import load_recipe
from support.refusals import check, refused

DIGITS = (resources.files("hpctrain.common.recipes") / "digits.yaml").read_text()

VARIANTS = """
variants:
  64: {}
  512:
    batch: {size: 512}
    schedule:
      warmup_epochs: 5
    reported:
      - {metric: test_accuracy, value: 0.96, batch: 512}
  adam:
    optimizer: {name: adam, momentum: 0, nesterov: false, weight_decay: 0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(DIGITS + VARIANTS)
    return path


def changed(file: Path, old: str, new: str) -> str:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return str(file)


def line_of(file: Path, part: str) -> int:
    text = file.read_text()
    return text[: text.index(part)].count("\n") + 1


def test_a_variant_changes_values_and_leaves_the_others_of_their_section(file: Path) -> None:
    base, large = load_recipe(f"{file}@64"), load_recipe(f"{file}@512")
    assert (large.batch.size, large.schedule.warmup_epochs) == (512, 5)
    assert (large.schedule.name, large.schedule.base_batch) == (base.schedule.name, base.schedule.base_batch)
    assert [row.value for row in large.reported] == [0.96]
    assert large.optimizer == base.optimizer
    assert (base.name, large.name) == ("digits@64", "digits@512")


def test_the_first_variant_is_meant_without_a_name(file: Path) -> None:
    assert variant_names(str(file)) == ("64", "512", "adam")
    assert load_recipe(str(file)) == load_recipe(f"{file}@64")
    assert variant_names("digits") == ()
    assert variant_names(f"{file}@512") == ()
    assert load_recipe("digits").name == "digits"


@pytest.mark.slow
def test_every_published_recipe_is_what_its_name_loads() -> None:
    entries = list(all_entries())
    assert {entry.name.partition("@")[0] for entry in entries} == set(recipe_names())
    assert all(load_entry(entry.name) == entry for entry in entries)
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("mlperf-resnet50@8129", "HT-recipe-unknown", {"variant": "8129", "recipe": "mlperf-resnet50"}),
        ("digits@64", "HT-recipe-unknown", {"variant": "64", "recipe": "digits"}),
        ("mlperf-resnet5@8192", "HT-recipe-unknown", {"name": "mlperf-resnet5"}),
        ("nowhere/mine.yaml@64", "HT-file-unreadable", {"kind": "recipe", "path": "nowhere/mine.yaml"}),
    ],
)
def test_names_that_are_not_there(name: str, code: str, values: dict[str, str]) -> None:
    with refused(code, **values) as caught:
        load_recipe(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "variant", "blamed", "code", "key"),
    [
        # What the variant says is blamed on its line, with its name.
        ("size: 512", "size: many", "512", "    batch: {size: many}", "HT-file-value", "batch.size"),
        (
            "momentum: 0,",
            "momentum: 0.9,",
            "adam",
            "    optimizer: {name: adam",
            *("HT-recipe-key-of-another", "momentum"),
        ),
        # What the base says is blamed on its own line, whichever variant was asked for.
        (
            "learning_rate: 0.025",
            "learning_rate: -1",
            "512",
            "  learning_rate: -1",
            *("HT-file-value", "optimizer.learning_rate"),
        ),
    ],
)
def test_a_fault_is_told_where_it_was_made(
    file: Path, old: str, new: str, variant: str, blamed: str, code: str, key: str
) -> None:
    path = changed(file, old, new)
    with pytest.raises(HpctrainError) as caught:
        load_recipe(f"{path}@{variant}")
    # What a variant says has its name in the place.
    named = f": variant {variant}" if blamed.startswith("    ") else ""
    check(caught.value, code, key=key, where=f"{file}:{line_of(file, blamed)}{named}")


@pytest.mark.parametrize("text", ["variants: 3", "variants:\n  a: 3"])
def test_variants_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{DIGITS}\n{text}\n")
    with refused("HT-recipe-file-not-valid", where=f"{path}:{line_of(path, 'variants:')}"):
        load_recipe(str(path))
