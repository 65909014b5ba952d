"""The first argument of ``run`` and ``submit``: a recipe or a script."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.cli.training_options import WorkOptions
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import encodable
from hpctrain.common.files.regular import open_regular
from hpctrain.common.recipes.entries import find
from hpctrain.common.recipes.load import load_recipe, override_recipe, require_no_overrides
from hpctrain.common.recipes.mesh import Mesh, parse_mesh
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.common.run.plan import Script
from hpctrain.report.output import say

# How other kinds of files become a script.
_OTHER_CODE = {
    ".ipynb": "jupyter nbconvert --to script {work} makes a script of it",
    ".pyz": "run a script that consists of: import runpy; runpy.run_path({work!r}, run_name='__main__')",
    ".sh": "run the Python script that it starts; variables that it sets go before hpctrain",
}
_STARTERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "srun")


def require_work(work: str) -> None:
    """Check that an argument names a recipe or a script, before a command asks a cluster about anything.

    Raises:
        HpctrainError: it names neither.
    """
    if work.endswith(".py"):
        _require_script(work)
    else:
        _refuse_other_code(work)
        find(work)


def _refuse_other_code(work: str) -> None:
    hint = _OTHER_CODE.get(Path(work).suffix)
    if work in _STARTERS:
        hint = "leave it out: hpctrain run SCRIPT.py -np N -- ARGUMENTS"
    if hint:
        raise HpctrainError(
            "HT-work-not-a-script",
            "{work} is neither a recipe nor a Python script",
            hint.format(work=work),
            work=work,
        )


def _require_script(work: str) -> Path:
    path = Path(work).resolve()
    try:
        open_regular(path).close()
    except OSError as error:
        raise HpctrainError(
            "HT-file-unreadable",
            "cannot read the script {path}: {reason}",
            f"looked for {path}",
            path=work,
            reason=error.strerror,
        ) from error
    return path


def read_work(work: str, training: WorkOptions, arguments: Sequence[str] = ()) -> Recipe | Script:
    """The recipe or script that an argument names.

    Args:
        work: a recipe's name or file, or a script's file.
        training: a smoke run shrinks the recipe before ``--set`` changes it.

    Raises:
        HpctrainError: it cannot be read, or an option is for the other kind.
    """
    if not work.endswith(".py"):
        _refuse_other_code(work)
        _refuse_arguments(work, arguments)
        return training.tracked(print_notes(_recipe(work, training.of_recipe, small=training.small)))
    if training.small:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--smoke is for recipes, and {script} is a script",
            "its arguments go after --",
            script=work,
        )
    require_no_overrides(work, training.overrides or ())
    path = _require_script(work)
    for text in (str(path), *arguments):
        if encodable(text) != text:
            hint = "rename the file" if text == str(path) else "give the script another argument"
            raise HpctrainError(
                "HT-plan-not-utf8", "{text!r} is not UTF-8, and plan.json can hold no other text", hint, text=text
            )
    divided = parse_mesh(training.mesh) if training.mesh is not None else Mesh()
    return training.tracked(Script(path=path, name=work, arguments=tuple(arguments), mesh=divided))


def _refuse_arguments(recipe: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "arguments are for a script, and {recipe} is a recipe: {arguments}",
            "--set KEY=VALUE sets a value of a recipe, as in --set epochs=5; --run-dir DIR names a run's folder",
            recipe=recipe,
            arguments=shlex.join(arguments),
        )


def _recipe(work: str, overrides: Sequence[str], *, small: bool) -> Recipe:
    """The recipe with overrides, which change a smoke run after it was shrunk."""
    recipe = load_recipe(work)
    recipe = smoke(recipe) if small else recipe
    return override_recipe(recipe, overrides) if overrides else recipe


def print_notes(recipe: Recipe) -> Recipe:
    """Print once what ``--set`` changed besides the keys that it was given; returns the recipe."""
    for note in dict.fromkeys(recipe.notes):
        say(f"hpctrain: {note}", sys.stderr)
    return recipe
