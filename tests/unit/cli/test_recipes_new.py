"""``hpctrain recipes new``: what it counts and chooses, that its commands run, and what it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.cli.main import main
from hpctrain.common.recipes.entries import load_entry
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.own import LARGE, OwnImages, OwnText, OwnWeights, own_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.image_shards import Shards
from hpctrain.common.shards.listing import ImageFile
from hpctrain.common.shards.make import divided, drawn
from hpctrain.common.shards.manifest import read_manifest
from support.refusals import codes


def images(folder: Path, count: int, side: int = 40) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(count)
    for number in range(count):
        pixels = random.integers(0, 256, (side, side + 9, 3), np.uint8)
        suffix = "png" if number % 2 else "jpg"
        Image.fromarray(pixels).save(folder / f"{number:03}.{suffix}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in output.splitlines() if line.startswith("  hpctrain ")]


def test_class_folders_become_a_recipe_and_the_commands_that_train_it(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, count in {"it's a cat": 30, "dog": 40}.items():
        images(here / "my photos" / name, count)
    assert main(["recipes", "new", "pets", "--data", "my photos"]) == 0
    shard, run = commands(capfd.readouterr().out)
    recipe = load_recipe("pets.yaml")
    assert (recipe.name, recipe.model.classes, recipe.source) == ("pets", None, "")
    assert (recipe.images.size, recipe.images.test_size) == (32, 32)
    assert run[:2] == ["run", "pets.yaml"]
    assert recipe.data.path == str(here / "pets-shards")
    assert main(shard) == 0
    manifest = read_manifest(here / "pets-shards")
    counts = {split: found.samples for split, found in manifest.splits.items()}
    assert sum(counts.values()) == 70
    counted = f"{counts['train']} training and {counts['val']} validation images, of 2 classes"
    assert counted in (here / "pets.yaml").read_text()
    # The images of the shards themselves give the same recipe.
    assert main(["recipes", "new", "again", "--data", "pets-shards"]) == 0
    assert load_recipe("again.yaml") == recipe.model_copy(update={"name": "again"})
    # More images leave those where they are that were there.
    before = {shards.key(index) for shards in [Shards(here / "pets-shards", "val")] for index in range(len(shards))}
    images(here / "my photos" / "emu", 50)
    assert main([*shard[:3], "more", *shard[4:]]) == 0
    after = {shards.key(index) for shards in [Shards(here / "more", "val")] for index in range(len(shards))}
    assert {key for key in after if not key.startswith("emu")} == before
    # Another share would be another set.
    capfd.readouterr()
    assert main([*shard[:-1], "0.3"]) == 2
    assert codes(capfd.readouterr().err) == ["HT-shards-begun-otherwise"]


def members(number: int, count: int) -> list[ImageFile]:
    return [ImageFile("f", 0, 1, number, f"{number}_{image}") for image in range(count)]


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_a_class_of_few_images_has_some_of_each(share: float) -> None:
    classes = [members(number, 2 + number % 9) for number in range(500)]
    found = divided(Path("photos"), [str(number) for number in range(500)], classes, share)
    for number, whole in enumerate(classes):
        train, val = found["train"][number], found["val"][number]
        assert train and val
        assert sorted([*train, *val]) == sorted(whole)
        by_hash = [image for image in whole if drawn(image.key) < share * 2**64]
        assert val == by_hash or len(val) == 1 or len(train) == 1


def test_tokens(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "text").mkdir()
    for number in range(40):
        (here / "text" / f"{number}.txt").write_text("to be or not to be " * (number + 400))
    assert main(["data", "prepare-text", "text", "tokens", "--tokenizer", "bytes", "--validation-share", "0.2"]) == 0
    assert main(["recipes", "new", "bard", "--data", "tokens"]) == 0
    assert [each[0] for each in commands(capfd.readouterr().out)] == ["run"]
    recipe = load_recipe("bard.yaml")
    assert (recipe.model.name, recipe.model.vocabulary % 64) == ("gpt", 0)
    assert recipe.model.vocabulary >= 257


@pytest.mark.parametrize("train", [3, 700, LARGE - 1, LARGE, 10**7])
@pytest.mark.parametrize("side", [8, 32, 300])
def test_every_recipe_is_one(tmp_path: Path, train: int, side: int) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(own_recipe("own", OwnImages(classes=2, train=train, val=2, side=side), 'it\'s "here"\u0085'))
    recipe = load_entry(str(path))
    assert isinstance(recipe, Recipe)
    assert recipe.data.path == 'it\'s "here"\u0085'
    assert recipe.model.name == ("resnet50" if train >= LARGE else "resnet18")
    assert recipe.batch.size == 8 or 20 * (recipe.batch.size or 0) <= train
    assert 32 <= recipe.images.size <= 224
    assert max(map(len, path.read_text().splitlines())) <= 120
    given = OwnWeights(path="it's here/model.safetensors", model="resnet50")
    path.write_text(own_recipe("own", OwnImages(classes=2, train=train, val=2, side=side), "shards", given))
    tuned = load_recipe(str(path))
    assert (tuned.model.init_from, tuned.model.name) == (given.path, given.model)
    assert tuned.epochs < recipe.epochs
    assert {*tuned.optimizer.rates.values()} == {0.1}
    path.write_text(own_recipe("own", OwnText(vocabulary=300, train=train * 1000, val=2), "tokens"))
    assert load_recipe(str(path)).model.vocabulary == 320


def lay_out(folder: Path, kind: str) -> None:
    """Folders that are wrong in one way."""
    wrong: dict[str, dict[str, int]] = {
        "one class": {"cat": 20},
        "train alone": {"train/cat": 20, "train/dog": 20},
        "too few": {"cat": 1, "dog": 20},
    }
    for name, count in wrong.get(kind, {}).items():
        images(folder / name, count)
    if kind == "empty":
        folder.mkdir()
    for name in ("cat", "dog") if kind == "no image" else ():
        (folder / name).mkdir(parents=True)
        for number in range(30):
            (folder / name / f"{number}.png").write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("not there", "is not a folder"),
        ("empty", "has no folder of a class"),
        ("one class", "has one class"),
        ("no image", "can be decoded"),
        ("train alone", "is not there"),
        ("too few", "has one image"),
    ],
)
def test_what_is_refused(here: Path, capfd: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    lay_out(here / "photos", kind)
    assert main(["recipes", "new", "pets", "--data", "photos"]) == 2
    said = capfd.readouterr().err
    assert codes(said) == ["HT-source-wrong"] and words in said
    assert not (here / "pets.yaml").exists()


def test_names_and_files_that_are_there(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images(here / "photos" / "cat", 20)
    (here / "pets.yaml").write_text("mine")
    (here / "led.yaml").symlink_to(here / "elsewhere")
    for name, code in {
        "pets": "HT-output-exists",
        "led": "HT-output-exists",
        "../up": "HT-option-bad-value",
        "-x y": "HT-option-bad-value",
    }.items():
        assert main(["recipes", "new", "--data", "photos", "--", name]) == 2
        assert codes(capfd.readouterr().err) == [code]
    assert (here / "pets.yaml").read_text() == "mine"
    assert not (here / "elsewhere").exists()
