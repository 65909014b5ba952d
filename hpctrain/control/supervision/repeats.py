"""Runs one recipe with several seeds, one after the other.

::

    RUN_DIR/repeats.json    the seeds; once runs have ended, their results as well
    RUN_DIR/seed-S/         the run directory of one seed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error, reading
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.private import make_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, read_model, write_json
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.resuming import resume_command, task_number
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.supervision.interrupts import Interrupted, Interrupts

_LARGEST_SEED = 2**32 - 1
_FILE = "repeats.json"


class _Seeds(BaseModel):
    seeds: tuple[int, ...] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class Series:
    """The runs in one directory, by seed.

    Attributes:
        places: their directories, where these are not called after the seeds.
    """

    path: Path
    seeds: tuple[int, ...]
    places: Mapping[int, RunDirectory] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.path / _FILE

    @property
    def runs(self) -> dict[int, RunDirectory]:
        return {seed: self.places.get(seed) or RunDirectory(self.path / f"seed-{seed}") for seed in self.seeds}

    def run(self, run_one: Callable[[int, RunDirectory], int], say: Callable[[str], None]) -> int:
        """Run the seeds that are not done, up to the first that fails.

        Args:
            run_one: begins or goes on with a run, by its number from 0 and its directory, which has its plan; returns
                its exit code, 0 for one that was done before.
            say: tells the user which run it is.

        Returns:
            The exit code of the last run.

        Raises:
            HpctrainError: that of the run that could not be carried out, with how to go on with all.
        """
        with Interrupts(self._stop_signal) as interrupts:
            for number, (seed, directory) in enumerate(self.runs.items()):
                say(f"seed {seed} ({number + 1} of {len(self.seeds)}): {directory.path}")
                try:
                    interrupts.check()
                    code = run_one(number, directory)
                except Interrupted as interrupted:
                    say(str(interrupted))
                    code = RESUMABLE
                except HpctrainError as error:
                    raise self._with_hint(seed, error) from error
                if code:
                    say(f"seed {seed} is not done; {self._to_go_on}")
                    return code
        return 0

    @property
    def _stop_signal(self) -> str:
        return read_model(self.runs[self.seeds[0]].plan, Plan).stop.signal

    @property
    def _to_go_on(self) -> str:
        return f"to resume all seeds: {resume_command(RunDirectory(self.path))}"

    def _with_hint(self, seed: int, error: HpctrainError) -> HpctrainError:
        hint = "\n  ".join(filter(None, (error.hint, self._to_go_on)))
        return error.but(before=f"seed {seed}: ", hint=hint)


def repeated(plan: Plan, count: int) -> dict[int, Plan]:
    """Copies of the plan with its recipe's seed and the ``count`` - 1 following ones, by seed.

    Raises:
        HpctrainError: as in :func:`with_seeds`.
    """
    recipes = with_seeds(plan.recipe or plan.title, count)
    return {recipe.seed: plan.model_copy(update={"recipe": recipe}) for recipe in recipes}


def with_seeds(work: Recipe | str, count: int) -> list[Recipe]:
    """The recipe with its own seed and the ``count`` - 1 following ones.

    Args:
        work: the recipe, or the name of a script, which is refused.

    Raises:
        HpctrainError: it is a script, or a seed would be too large.
    """
    if isinstance(work, str):
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--repeat is for recipes, and {title} is a script",
            "run it once for each of its own seeds",
            title=work,
        )
    recipe = work
    if recipe.seed + count - 1 > _LARGEST_SEED:
        raise HpctrainError(
            "HT-option-bad-value",
            "--repeat {count}: the largest seed is {largest_seed}",
            "--set seed=0 starts at 0",
            count=count,
            largest_seed=_LARGEST_SEED,
        )
    seeds = range(recipe.seed, recipe.seed + count)
    return [recipe.model_copy(update={"seed": seed}) for seed in seeds]


def create_series(path: Path, plans: dict[int, Plan]) -> Series:
    """Make the directory of the series and those of its runs, and run nothing.

    Raises:
        HpctrainError: there is something already, or it cannot be made.
    """
    series = Series(path=path, seeds=tuple(plans))
    try:
        make_folder(path)
        if any(path.iterdir()):
            raise _refusal(series)
    except OSError as error:
        raise disk_error(error, path) from error
    for seed, directory in series.runs.items():
        directory.create(plans[seed])
    write_json(series.file, {"recipe": plans[series.seeds[0]].title, "seeds": series.seeds})
    return series


def _refusal(series: Series) -> HpctrainError:
    if series.file.exists():
        command = resume_command(RunDirectory(series.path))
        return HpctrainError(
            "HT-run-directory-taken",
            "{path} already holds repeated runs",
            f"to resume them: {command}",
            path=series.path,
        )
    what = "a run" if RunDirectory(series.path).plan.exists() else "other files"
    return HpctrainError(
        "HT-run-directory-taken",
        "{path} already holds {content}",
        "--repeat needs a directory of its own: --run-dir DIR",
        path=series.path,
        content=what,
    )


def read_series(path: Path) -> Series | None:
    """The series in a directory; None if there is none.

    Raises:
        HpctrainError: its file is damaged, or cannot be looked for.
    """
    file = path / _FILE
    with reading(path):
        there = file.exists()
    return Series(path=path, seeds=read_model(file, _Seeds).seeds) if there else None


def array_series(path: Path) -> Series | None:
    """The tasks of an array of jobs as repeated runs; None where the directory is no array's.

    Raises:
        HpctrainError: the tasks differ in more than the seed, or a plan cannot be read.
    """
    tasks = {number: folder for folder in path.glob("task-*") if (number := task_number(folder)) is not None}
    if not tasks or not RunDirectory(path).submission.exists():
        return None
    places: dict[int, RunDirectory] = {}
    recipes: list[Recipe] = []
    for _, folder in sorted(tasks.items()):
        directory = RunDirectory(folder)
        if recipe := read_model(directory.plan, Plan).recipe:
            places[recipe.seed] = directory
            recipes.append(recipe.model_copy(update={"seed": 0}))
    if len(places) < len(tasks) or any(recipe != recipes[0] for recipe in recipes):
        raise HpctrainError(
            "HT-array-not-of-seeds",
            "{path} is an array of {tasks} tasks that are not one recipe with a seed each, which have no mean",
            f"hpctrain report {shell_word(path / f'task-{min(tasks)}')} is about one task",
            path=path,
            tasks=len(tasks),
        )
    return Series(path=path, seeds=tuple(places), places=places)


def require_no_series(path: Path) -> None:
    """Refuse a directory of repeated runs as the directory of another run.

    Raises:
        HpctrainError: it is one.
    """
    # Other faults of the path are reported where the directory is made.
    if os.path.exists(path / _FILE) and (series := read_series(path)):  # noqa: PTH110
        raise _refusal(series)


def require_count(series: Series, count: int | None) -> None:
    """Refuse to resume with another number of seeds."""
    if count not in (None, len(series.seeds)):
        raise HpctrainError(
            "HT-run-other-settings",
            "{path} has {seeds} seeds, and --repeat {count} was asked for",
            "--resume without --repeat continues those; another number needs another --run-dir",
            path=series.path,
            seeds=len(series.seeds),
            count=count,
        )
