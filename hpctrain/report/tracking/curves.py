"""The names and values of a run's curves, the same for every tracker.

========================== ===================================================================
``step/loss``              the loss of each step
``step/learning_rate``
``step/seconds``           how long it took
``step/samples_per_s``     of all ranks
``step/communication_share``  of its time, 0 to 1
``epoch/NAME``             each measurement of an epoch: ``train_loss``, ``test_accuracy``,
                           ``samples_per_s`` and what else its event has
``NAME``                   what a script logs, as it names it
========================== ===================================================================

All are over the number of the step, and what is not finite or was not measured is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import EpochEvent, LogEvent, StartEvent, StepEvent
from hpctrain.common.run.value_types import ratio

# MLflow takes no other names (mlflow/utils/validation.py), and a curve has the same name in every tracker.
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
_LONGEST = 240


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one moment.

    Attributes:
        iteration: the number of the step.
        time: in seconds since the epoch.
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
