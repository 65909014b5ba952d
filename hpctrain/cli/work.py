"""What the first argument of ``run`` and ``submit`` names."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.plan import Script
from hpctrain.recipes.load import load_recipe, override_recipe
from hpctrain.recipes.schema import Recipe
from hpctrain.recipes.smoke import smoke


def read_work(work: str, overrides: Sequence[str], arguments: Sequence[str], *, small: bool = False) -> Recipe | Script:
    """The recipe or script.

    Args:
        work: a recipe's name or file, or a script's file.
        overrides: ``key=value`` each, for a recipe.
        arguments: for a script.
        small: the recipe as :func:`hpctrain.recipes.smoke.smoke` makes it, which overrides then change.

    Raises:
        HpctrainError: it cannot be read, or gets what is for the other kind.
    """
    if not work.endswith(".py"):
        if arguments:
            raise HpctrainError(f"arguments are for a script, and {work} is a recipe: {shlex.join(arguments)}")
        if not small:
            return load_recipe(work, overrides)
        return override_recipe(smoke(load_recipe(work)), overrides)
    if small:
        raise HpctrainError(f"--smoke is for recipes, and {work} is a script", "its arguments go behind --")
    if overrides:
        raise HpctrainError(f"--set is for recipes, and {work} is a script", "its arguments go behind --")
    path = Path(work).resolve()
    try:
        path.open("rb").close()
    except OSError as error:
        raise HpctrainError(f"cannot read the script {work}: {error.strerror}", f"looked for {path}") from error
    return Script(path=path, arguments=tuple(arguments))


def read_tasks(
    work: str, overrides: Sequence[str], arguments: Sequence[str], tasks: Sequence[int], *, small: bool = False
) -> dict[int | None, Recipe | Script]:
    """What each task of an array does, ``%a`` in overrides and arguments being its number; of any other run under None.

    Raises:
        HpctrainError: as of :func:`read_work`, or every task would do the same training.
    """
    if not tasks:
        return {None: read_work(work, overrides, arguments, small=small)}
    # The file is read once: a recipe's overrides follow.
    chosen = read_work(work, overrides if work.endswith(".py") else (), arguments, small=small)
    if isinstance(chosen, Script):
        return {
            task: chosen.model_copy(update={"arguments": tuple(each.replace("%a", str(task)) for each in arguments)})
            for task in tasks
        }
    if not any("%a" in override for override in overrides):
        raise HpctrainError(
            "--array: every task would do the same training", "%a is the task's number: --set seed=%a, for example"
        )
    return {task: override_recipe(chosen, [each.replace("%a", str(task)) for each in overrides]) for task in tasks}


def default_directory(title: str) -> Path:
    """Where the files of a run go that nobody has named a place for."""
    # Slurm gives the others a meaning in paths of logs, and a name with a slash would be a path.
    name = Path(title.translate(dict.fromkeys(map(ord, "%\\\0"), "-"))).stem
    return Path("runs") / f"{name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
