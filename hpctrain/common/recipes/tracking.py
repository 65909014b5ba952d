"""Where a run's curves go beside its own record: the trackers, by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from hpctrain.common.errors import HpctrainError, nearest

Tracker = Literal["tensorboard", "mlflow", "wandb"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)
DEFAULT: tuple[Tracker, ...] = ("tensorboard",)
"""Of a run that names none."""

_NONE = "none"


def _tuple(value: Any) -> Any:
    """One name stands for a list of it, and a name that is given twice is meant once."""
    if isinstance(value, str):
        return (value,)
    return tuple(dict.fromkeys(map(str, value))) if isinstance(value, list | tuple) else value


Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(_tuple)]


def parse_trackers(text: str) -> tuple[Tracker, ...]:
    """The trackers of ``--tracking``, such as ``tensorboard,mlflow``; none of ``none``.

    Raises:
        HpctrainError: an unknown name.
    """
    if text.strip() == _NONE:
        return ()
    found: list[Tracker] = []
    for name in map(str.strip, text.split(",")):
        if name not in TRACKERS:
            raise HpctrainError(
                "HT-choice-unknown",
                "--tracking {text}: unknown tracker {name!r}",
                nearest(name, (*TRACKERS, _NONE)),
                text=text,
                name=name,
            )
        found += [known for known in TRACKERS if known == name and known not in found]
    return tuple(found)
