"""Several seeds of one recipe, without ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.resuming.resume import changed_work
from hpctrain.control.supervision.repeats import Series, create_series, read_series, repeated, require_count
from support import needs
from support.refusals import codes, refused


def a_plan(seed: int = 7) -> Plan:
    return Plan(recipe=load_recipe("digits", [f"seed={seed}"]), framework="torch", ranks=2, threads_per_rank=1)


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return create_series(tmp_path / "series", repeated(a_plan(), 3))


def test_plans_differ_by_their_seed_alone(series: Series) -> None:
    plans = {seed: read_model(directory.plan, Plan) for seed, directory in series.runs.items()}
    assert plans == {seed: a_plan(seed) for seed in (7, 8, 9)}
    assert read_series(series.path) == series


def test_runs_go_in_order_and_end_with_the_first_that_fails(series: Series) -> None:
    codes, said = {0: 0, 1: RESUMABLE, 2: 0}, list[str]()
    begun: list[tuple[int, str]] = []

    def run_one(number: int, directory: RunDirectory) -> int:
        begun.append((number, directory.path.name))
        return codes[number]

    assert series.run(run_one, said.append) == RESUMABLE
    assert begun == [(0, "seed-7"), (1, "seed-8")]
    command = f"hpctrain run --resume --run-dir {series.path}"
    assert said[-1].endswith(f": {command}")
    codes[1] = 0
    assert series.run(run_one, said.append) == 0
    assert [number for number, _ in begun[2:]] == [0, 1, 2]


def test_what_a_run_raises_says_how_all_go_on(series: Series) -> None:
    def run_one(number: int, directory: RunDirectory) -> int:
        raise HpctrainError("HT-of-test", "wrong", "mend it", exit_code=4)

    with refused("HT-of-test") as caught:
        series.run(run_one, lambda text: None)
    assert (caught.value.message.partition(": ")[::2], caught.value.exit_code) == (("seed 7", "wrong"), 4)
    mend, command = caught.value.hint.splitlines()
    assert mend == "mend it" and "run --resume" in command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_between_two_runs_begins_no_other(series: Series, number: signal.Signals) -> None:
    begun: list[int] = []
    # A shell has its background jobs ignore SIGINT.
    before = signal.signal(number, signal.SIG_DFL)

    def run_one(seed: int, directory: RunDirectory) -> int:
        begun.append(seed)
        os.kill(os.getpid(), number)
        return 0

    try:
        assert series.run(run_one, lambda text: None) == RESUMABLE
    finally:
        signal.signal(number, before)
    assert begun == [0]


def test_directory_of_something_else(series: Series, tmp_path: Path) -> None:
    plans = repeated(a_plan(), 2)
    with refused("HT-run-directory-taken") as caught:
        create_series(series.path, plans)
    assert "--resume --run-dir" in caught.value.hint
    with refused("HT-run-directory-taken", content="a run"):
        create_series(series.runs[7].path, plans)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with refused("HT-run-directory-taken", content="other files"):
        create_series(tmp_path / "mine", plans)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    with refused("HT-file-unwritable", path=tmp_path / "mine" / "notes.txt"):
        create_series(tmp_path / "mine" / "notes.txt", plans)


def test_wrong_use(series: Series) -> None:
    with refused("HT-option-bad-value", largest_seed=4294967295):
        repeated(a_plan(seed=2**32 - 2), 3)
    assert list(repeated(a_plan(seed=2**32 - 2), 2)) == [2**32 - 2, 2**32 - 1]
    script = a_plan().model_copy(update={"recipe": None, "script": Script(path=Path("train.py"))})
    with refused("HT-option-not-usable-here", title="train.py"):
        repeated(script, 2)
    require_count(series, None)
    require_count(series, 3)
    with refused("HT-run-other-settings", seeds=3, count=2):
        require_count(series, 2)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--repeat", "0"]) == 2
    Path("train.py").touch()
    assert main(["run", "train.py", "--repeat", "2"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-option-not-usable-here"]
    assert main(["run", "digits", "--repeat", "2", "--dry-run", "--run-dir", "series"]) == 0
    commands = capsys.readouterr().out
    assert commands.count("\nenv ") == commands.count(f"hpctrain.worker.train {tmp_path / 'series' / 'seed-'}") == 2
    assert not Path("series").exists()


def test_a_batch_by_ranks_is_the_same_work_on_whatever_ranks() -> None:
    """A plan has the size for the ranks that the run was begun with; the recipe's name says the size of none."""
    recipe = load_recipe("digits", ["batch={per_rank: 24}"])
    plan = a_plan().model_copy(update={"recipe": recipe.at(3), "ranks": 2})
    assert changed_work(plan, recipe) == (plan, {})
    with refused("HT-run-other-settings", differences={"batch.size": (72, 70)}):
        changed_work(plan, load_recipe("digits", ["batch={per_rank: 35}"]))


def test_a_batch_by_ranks_is_the_same_work_under_whatever_mesh() -> None:
    recipe = load_recipe("digits", ["batch={per_rank: 24}"]).model_copy(update={"mesh": Mesh(tp=2)})
    plan = a_plan().model_copy(update={"recipe": recipe.at(6), "ranks": 6})
    assert changed_work(plan, recipe) == (plan, {})
    sharded = recipe.model_copy(update={"mesh": Mesh(dp_shard=2)})
    assert set(changed_work(plan, sharded, accept=True)[1]) == {"mesh.dp_shard", "mesh.tp"}


def test_a_series_is_no_place_for_another_run(series: Series, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(series.path.rglob("*"))
    for command in (["run", "digits"], ["run", "digits", "--dry-run"], ["submit", "digits", "--dry-run"]):
        assert main([*command, "--run-dir", str(series.path)]) == 2
        said = capsys.readouterr()
        assert codes(said.err) == ["HT-run-directory-taken"]
        assert f"--resume --run-dir {series.path}" in said.err
        assert said.out == ""
    assert sorted(series.path.rglob("*")) == before


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_commands_for_one_run_name_those_of_a_series(
    command: str, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(series.path)]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-run-is-several"]
    assert all(str(series.path / f"seed-{seed}") in said for seed in (7, 8, 9))


@needs.pytorch
def test_a_dry_run_of_a_series_says_what_is_to_be_known_once(capsys: pytest.CaptureFixture[str]) -> None:
    many = ("-np", "500", "--oversubscribe", "--backend", "mpi")
    assert main(["run", "digits", "--repeat", "3", *many, "--dry-run"]) == 0
    assert capsys.readouterr().err.count("500 ranks") == 1


def test_a_thousand_seeds_are_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--repeat", "1001", "--dry-run"]) == 2
    assert " 1000" in capsys.readouterr().err
