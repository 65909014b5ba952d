"""Recipe files and overrides: what is taken, and what is said about what is not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import subsection
from hpctrain.common.recipes.compatibility import IDLE_KEYS, OWN_KEYS
from hpctrain.common.recipes.difference import deciding_differences
from hpctrain.common.recipes.entries import load_entry
from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.names import recipe_names
from hpctrain.common.recipes.schema import Recipe
from hpctrain.report.results import row_text

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
        assert load_entry(name).name.partition("@")[0] == name


def test_a_file_is_the_same_as_the_published_recipe(tmp_path: Path) -> None:
    assert load_recipe(recipe_file(tmp_path, DIGITS)) == load_recipe("digits")


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "1e-04", "0.0001", "1.e-4", ".1e-3"])
def test_floats_as_in_yaml_1_2(tmp_path: Path, text: str) -> None:
    file = changed(tmp_path, "weight_decay: 1.0e-4", f"weight_decay: {text}")
    assert load_recipe(file).optimizer.weight_decay == 1e-4


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
    ("override", "said"),
    [
        ("optimizer.learnin_rate=1", "unknown key 'learnin_rate'\n  did you mean 'learning_rate'?"),
        ("optimzer.name=adam", "did you mean 'optimizer'?"),
        ("optimizer={nme: sgd, learning_rate: 1}", "unknown key 'optimizer.nme'; did you mean 'name'?"),
        ("epochs=many", "--set epochs=many: epochs: input should be a valid integer, not 'many'"),
        ("epochs=2.5", "--set epochs=2.5: epochs: "),
        ("epochs='3'", "valid integer"),
        ("batch.drop_last=1", "valid boolean"),
        ("optimizer.learning_rate=.inf", "finite"),
        ("optimizer.learning_rate=-1", "greater than 0"),
        ("schedule.milestones=[1, x]", "schedule.milestones.1"),
        ("optimizer=3", "--set optimizer=3: optimizer: "),
        (
            "optimizer.name=adam",
            "--set optimizer.name=adam: optimizer: momentum belongs to sgd, lars and rmsprop_to_sgd, not to adam",
        ),
        ("epochs.of=3", "epochs is a value and has no keys"),
        ("epochs", "not of the form key=value"),
        ("epochs=[", "not valid YAML"),
        (
            "data={[name]: digits}",
            "--set data={[name]: digits}: the value is not valid YAML: a key is one word or number",
        ),
        ("=3", "not of the form key=value"),
        ("epochs=1:30", "--set epochs=1:30: epochs: input should be a valid integer, not '1:30'"),
        ("epochs=0x1f", "valid integer"),
        ("epochs=010", "valid integer"),
        ("epochs=1_000", "valid integer"),
        ("optimizer.learning_rate=1:30.5", "valid number"),
        ("optimizer.learning_rate=1_0.5", "valid number"),
        (f"epochs={'9' * 5000}", "valid integer, not '99999"),
        ("data=&a [*a]", "not valid YAML: the alias *a has no place in a recipe"),
        ("data=&a {name: *a}", "not valid YAML: the alias *a"),
        ("data=!!timestamp x", "not valid YAML: the tag tag:yaml.org,2002:timestamp has no place"),
        (f"data={'[' * 3000}{']' * 3000}", "not valid YAML: nested more than 20 deep"),
        ("schedule.base_batch=null", "warmup_epochs needs base_batch"),
        ("schedule.warmup_epochs=21", "is longer than the run (epochs: 20); --set schedule.warmup_epochs=0 does"),
        ("schedule={name: step, milestones: [5, 20]}", "schedule.milestones (20) are not all within the run"),
        (
            "schedule={name: triangular, peak_epoch: 20, warmup_from: 0}",
            "schedule.peak_epoch (20) is not within the run (epochs: 20); for example --set schedule.peak_epoch=10",
        ),
        (
            "schedule={name: polynomial, end_rate: 0.1}",
            "schedule.end_rate (0.1) is above optimizer.learning_rate (0.025), which should fall to it; --set ",
        ),
        (
            "schedule.end_rate=0.06",
            "schedule.end_rate (0.06) is above optimizer.learning_rate, scaled to batch.size 64 (0.05), which should",
        ),
        ("epochs=100001", "epochs: input should be less than or equal to 100000"),
        ("model.zero_gamma=false", "model: zero_gamma belongs to resnet18, resnet50 and resnet101, not to digits_cnn"),
        ("model.batch_norm.span=8", "model: batch_norm belongs to resnet18, resnet50 and resnet101, not to digits_cnn"),
        ("schedule.milestones=[3]", "schedule: milestones belongs to step and piecewise, not to cosine"),
        ("schedule.warmup_from=-0.1", "schedule.warmup_from: input should be greater than or equal to 0"),
        ("images.size_ramp=[[4, 160], [4, 192]]", "images: the epochs of size_ramp must rise"),
        ("images.crop_area=[0.5, 0.1]", "images: crop_area is a smallest and a largest share, at most 1"),
        ("images.crop_area=[0.5, 1.1]", "images: crop_area is a smallest and a largest share, at most 1"),
        ("images.crop_ratio=[2, 1]", "images: crop_ratio is a smallest and a largest one"),
        ("images.test_size=300", "images: test_size (300) is more than test_resize (256) leaves"),
        ("schedule.decay_steps=0", "schedule.decay_steps: input should be greater than or equal to 1"),
        ("model.batch_norm.span=0", "model.batch_norm.span"),
        ("batch.per_rank=0", "batch.per_rank: input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_override(override: str, said: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        load_recipe("digits", [override])
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_rate_that_ends_above_its_peak_on_these_ranks() -> None:
    recipe = load_recipe("digits", ["batch={per_rank: 8}", "schedule.end_rate=0.01"])
    assert recipe.at(2).global_batch == 16
    with pytest.raises(HpctrainError, match=r"end_rate \(0\.01\) is above .* to batch\.size 8 \(0\.00625\), which"):
        recipe.at(1)


def test_an_override_within_an_overridden_value() -> None:
    with pytest.raises(HpctrainError, match="optimizer was set to 3 before"):
        load_recipe("digits", ["optimizer=3", "optimizer.name=sgd"])


@pytest.mark.parametrize(
    ("old", "new", "line_of", "said"),
    [
        ("momentum: 0.9", "momentun: 0.9", "momentun", "unknown key 'optimizer.momentun'; did you mean 'momentum'?"),
        ("epochs: 20", "epochs: twenty", "epochs: twenty", "epochs: input should be a valid integer, not 'twenty'"),
        ("  name: cosine", "  name: cosin", "  name: cosin", "schedule.name: input should be 'constant', 'cosine'"),
        ("  size: 64", "  micro_batch: 1", "batch:", "one of size (over all ranks) and per_rank is needed"),
        ("warmup_epochs: 2", "warmup_epochs: 40", "name: digits\n", "longer than the run"),
        ("seed: 7", "epochs: 7", "epochs: 7", "the key 'epochs' was already given in line "),
        ("seed: 7", "seed: [7", "", "not valid YAML"),
        ("seed: 7", "[seed]: 7", "[seed]", "a key is one word or number, not a list or mapping"),
        ("seed: 7", "? {a: b}\n: 7", "? {a", "a key is one word or number, not a list or mapping"),
        ("seed: 7", "seed: 2020-01-01", "seed: 2020", "valid integer"),
        ("seed: 7", "seed: 1:30", "seed: 1:30", "seed: input should be a valid integer, not '1:30'"),
        ("seed: 7", "seed: &a [*a]", "seed: &a", "not valid YAML: the alias *a has no place in a recipe"),
        ("seed: 7", f"seed: {'[' * 3000}", "seed: [", "not valid YAML: nested more than 20 deep"),
        ("seed: 7", f"seed: {'9' * 5000}", "seed: 999", "valid integer"),
    ],
)
def test_a_wrong_file_names_the_line(tmp_path: Path, old: str, new: str, line_of: str, said: str) -> None:
    file = changed(tmp_path, old, new)
    with pytest.raises(HpctrainError) as caught:
        load_recipe(file)
    assert said in str(caught.value)
    if line_of:
        text = Path(file).read_text()
        assert f"{file}:{text[: text.index(line_of)].count(chr(10)) + 1}: " in str(caught.value)


def test_every_fault_is_told(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError) as caught:
        load_recipe(changed(tmp_path, "seed: 7", "seed: -1\nspeed: 3"))
    assert "seed: " in str(caught.value)
    assert "'speed'" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no recipe"),
        (b"- a\n- b\n", "holds no recipe"),
        (b"just words", "holds no recipe"),
        (b"\xff\xfe\x00\x01", "not a text file"),
        (b"a: !!python/object:os.system x", "not valid YAML"),
        (b"1: 2\nnull: 3\n", "unknown key"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(HpctrainError, match=said):
        load_recipe(str(path))


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match="unknown recipe 'digit'\n  did you mean 'digits'"):
        load_recipe("digit")
    with pytest.raises(HpctrainError, match=r"cannot read the recipe .*No such file"):
        load_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(HpctrainError, match=r"Is a directory\n  the published recipes go by their name: .*, digits, "):
        load_recipe(f"{tmp_path}/")


@pytest.mark.parametrize("reverse", [False, True])
def test_fault_tolerance_in_one_word_leaves_the_other_overrides(reverse: bool) -> None:
    given = ["fault_tolerance.min_ranks=2", "fault_tolerance=shrink"]
    tolerance = load_recipe("digits", given[::-1] if reverse else given).fault_tolerance
    assert (tolerance.lost_rank, tolerance.min_ranks) == ("shrink", 2)
    whole = override_recipe(load_recipe("digits", given), ["fault_tolerance=stop"]).fault_tolerance
    assert (whole.lost_rank, whole.min_ranks) == ("stop", 1)
    contrary = ["fault_tolerance.min_ranks=2", "fault_tolerance=stop"]
    with pytest.raises(HpctrainError, match="fault_tolerance was set to 'stop'"):
        load_recipe("digits", contrary[::-1] if reverse else contrary)


@pytest.mark.parametrize("key", ["batch=shrink", "min_ranks=2"])
def test_what_only_a_fault_tolerant_run_can_have(key: str) -> None:
    with pytest.raises(HpctrainError, match=f"{key.replace('=', ': ')} needs lost_rank: shrink"):
        load_recipe("digits", [f"fault_tolerance.{key}"])


def test_elastic_in_one_word() -> None:
    given = ["fault_tolerance.max_ranks=8", "fault_tolerance=elastic", "fault_tolerance=shrink"]
    tolerance = load_recipe("digits", given).fault_tolerance
    assert (tolerance.lost_rank, tolerance.grow, tolerance.max_ranks) == ("shrink", True, 8)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["fault_tolerance=elastik"], "'stop', 'shrink', 'elastic' or a section, not 'elastik'"),
        (["fault_tolerance.max_ranks=4"], "max_ranks: 4 needs grow: true"),
        (["fault_tolerance=elastic", "fault_tolerance.max_ranks=2", "fault_tolerance.min_ranks=3"], "is below min"),
        (["communication.compression=top_k", "communication.top_k=1"], "less than 1"),
        (["communication.compression=top_k", "precision=fp16"], "precision: fp16 scales each step's differently"),
        (["communication.compression=top_k", "numbers.non_finite=roll_back"], "roll_back undoes the steps"),
        (["fault_tolerance={grow: true, lost_rank: shrink, batch: shrink}"], "batch: shrink would also grow"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], fault: str) -> None:
    with pytest.raises(HpctrainError, match=fault):
        load_recipe("digits", overrides)


def test_fewer_epochs_than_the_warm_up_has_clip_it_and_say_so() -> None:
    recipe = load_recipe("digits", ["epochs=1"])
    assert (recipe.epochs, recipe.schedule.warmup_epochs) == (1, 1)
    assert recipe.notes == (
        "--set epochs=1: the warm-up of 2 epochs is clipped to the whole run; "
        "--set schedule.warmup_epochs=0 does without",
    )
    assert load_recipe("digits", ["epochs=2"]).notes == ()
    # Said of one change; and what was asked for is not changed.
    assert override_recipe(recipe, ["seed=3"]).notes == ()
    with pytest.raises(HpctrainError, match="is longer than the run"):
        load_recipe("digits", ["epochs=1", "schedule.warmup_epochs=2"])
    assert load_recipe("digits", ["epochs=1", "schedule.warmup_epochs=0"]).notes == ()
    with pytest.raises(HpctrainError, match="epochs: input should be greater than or equal to 1"):
        load_recipe("digits", ["epochs=0"])


@pytest.mark.parametrize(
    ("name", "override", "other"),
    [
        ("you2017-lars@8192", "optimizer.learning_rate=29", True),
        ("you2017-lars@8192", "schedule.decay_from=warmup", True),
        ("you2017-lars@8192", "epochs=90", True),
        ("you2017-lars@8192", "model.weights.fan=in", True),
        ("you2017-lars@8192", "data.limit=1000", True),
        ("you2017-lars@8192", "batch.micro_batch=32", True),
        ("you2017-lars@8192", "communication.compression=fp16", True),
        ("goyal2017", "batch.per_rank=64", True),
        # What leaves the result what it is, or has rows of its own.
        ("you2017-lars@8192", "optimizer.learning_rate=30", False),
        ("you2017-lars@8192", "data.path=/somewhere", False),
        ("you2017-lars@8192", "seed=3", False),
        ("you2017-lars@8192", "checkpoints.every_steps=10", False),
        ("you2017-lars@8192", "fault_tolerance=shrink", False),
        ("mlperf-resnet50@8192", "batch.micro_batch=32", False),
        ("goyal2017", "batch.emulated_ranks=256", False),
        ("digits-large-minibatch", "batch.size=256", False),
    ],
)
def test_reported_results_are_of_other_values_once_one_is_changed(name: str, override: str, other: bool) -> None:
    recipe = load_recipe(name, [override])
    assert {row.of_other_values for row in recipe.reported} == {other}
    assert [row.value for row in recipe.reported] == [row.value for row in load_recipe(name).reported]
    assert {"of other values" in row_text(row) for row in recipe.reported} == {other}
    again = override_recipe(recipe, ["seed=5"])
    assert {row.of_other_values for row in again.reported} == {other}


def test_the_size_of_buckets_decides_what_top_k_sends() -> None:
    sizes = ["communication.bucket_mb=1", "communication.bucket_mb=25"]
    assert deciding_differences(*(load_recipe("digits", [size]) for size in sizes)) == []
    top = (load_recipe("digits", ["communication.compression=top_k", size]) for size in sizes)
    assert deciding_differences(*top) == ["communication.bucket_mb"]


@pytest.mark.parametrize(("section", "decisive", "kinds"), [*OWN_KEYS, *IDLE_KEYS])
def test_keys_of_kinds_exist(section: str, decisive: str, kinds: Mapping[str, str]) -> None:
    def model(path: str) -> type[BaseModel]:
        return functools.reduce(subsection, filter(None, path.split(".")), Recipe)

    holder, _, key = decisive.rpartition(".")
    assert kinds.keys() <= set(get_args(model(holder).model_fields[key].annotation))
    assert {name for keys in kinds.values() for name in keys.split()} <= model(section).model_fields.keys()
