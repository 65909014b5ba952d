"""What a tracker gets of a run: its parameters and facts, and the names and values of its curves.

``docs/tracking.md`` lists the curves. All are over the number of the step, and what is not finite or was not measured
is left out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.common.recipes.difference import flat, settings
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import EpochEvent, LogEvent, RunEvent, SlowRankEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.value_types import ratio
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


# MLflow takes no other names (mlflow/utils/validation.py), and a curve has the same name in every tracker.
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
_LONGEST = 240


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one moment.

    Attributes:
        values: finite numbers, by the names of their curves; at least one.
    """

    iteration: int
    time: float
    values: Mapping[str, float]


class Curves:
    """Makes points of a run's events, which it gets in order from the first."""

    def __init__(self) -> None:
        self._iteration = 0

    def point(self, event: Event) -> Point | None:
        """The point of an event; None for one without a value."""
        match event:
            case StartEvent():
                self._iteration = event.iteration
                return None
            case StepEvent():
                self._iteration = event.iteration
                return self._point_of(event, _named("step", _step_values(event)))
            case EpochEvent():
                return self._point_of(event, _named("epoch", {**event.metrics, **event.speeds}))
            case LogEvent():
                self._iteration = event.iteration
                return self._point_of(event, event.values)
            case SlowRankEvent():
                self._iteration = event.iteration
                return self._point_of(event, {f"slow_rank/{event.rank}/{event.cause}": event.seconds})
        return None

    def _point_of(self, event: Event, values: Mapping[str, float | None]) -> Point | None:
        known = {curve_name(name): value for name, value in values.items() if value is not None}
        return Point(iteration=self._iteration, time=event.time, values=known) if known else None


def curve_name(name: str) -> str:
    """A name that every tracker takes: letters, digits, ``_-. :`` and ``/`` of ASCII stay, others become ``_``.

    MLflow also refuses names that would not be a relative path within a folder.
    """
    parts = _REFUSED.sub("_", name)[:_LONGEST].split("/")
    path = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return f"__{path[2:]}" if path.startswith("..") else path


def _step_values(step: StepEvent) -> dict[str, float | None]:
    return {
        "loss": step.loss,
        "learning_rate": step.learning_rate,
        "seconds": step.seconds,
        "samples_per_s": ratio(step.samples, step.seconds),
        "communication_share": ratio(step.communication_seconds, step.seconds),
    }


def _named(group: str, values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {f"{group}/{name}": value for name, value in values.items()}
