"""The parameters and facts of a run that a tracker gets beside its curves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpctrain.common.recipes.difference import flat, settings
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import RunEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.secrets import is_secret

_HIDDEN = "…"
_OPTION = re.compile(r"-{1,2}([^=]+)(=.*)?", re.DOTALL)
# The user and the password of an address.
_ADDRESSED = re.compile(r"(?<=://)[^/@\s]*@")


def parameters(plan: Plan) -> dict[str, Any]:
    """The run's parameters by dotted key.

    For a recipe the values that take effect; for a script its name and arguments, without what looks like a secret.
    """
    if plan.recipe:
        known = settings(plan.recipe)
        used = {key: value for key, value in flat(used_values(plan.recipe)) if key in known}
        values = {"recipe": plan.recipe.name, **used}
    else:
        assert plan.script is not None
        arguments = shlex.join(_redacted(plan.script.arguments))
        values = {"script": plan.script.path.name, "arguments": arguments}
    values |= {"framework": plan.framework} | {f"versions.{name}": version for name, version in plan.versions.items()}
    return {key: value for key, value in values.items() if value not in (None, "", ())}


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The values as texts, for trackers that take nothing else."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def facts(events: Iterable[Event]) -> dict[str, Any]:
    """The facts that can differ between attempts, by name, each from the last of these events that states it."""
    known: dict[str, Any] = {}
    for event in events:
        match event:
            case StartEvent():
                known |= {"attempt": event.attempt, "job": event.job}
            case RunEvent():
                known |= {"ranks": event.ranks, "backend": event.backend, "model_parameters": event.parameters}
    return {key: value for key, value in known.items() if value is not None}


def title(plan: Plan, directory: RunDirectory) -> str:
    """The name that tells a run from others of its recipe or script."""
    folder = directory.path.absolute().name
    return folder if folder.startswith(plan.title.removesuffix(".py")) else f"{plan.title} {folder}"


def _redacted(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments of a script, without the values of those whose names suggest a secret."""
    hide = False
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        secret = option is not None and is_secret(option[1].replace("-", "_"))
        if hide and not option:
            yield _HIDDEN
        elif option and secret and option[2]:
            yield f"{argument.partition('=')[0]}={_HIDDEN}"
        else:
            yield _ADDRESSED.sub(f"{_HIDDEN}@", argument)
        hide = secret and not (option and option[2])
