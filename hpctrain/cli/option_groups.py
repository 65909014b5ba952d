"""Groups of options that several commands share: dataclasses, each of which a command takes as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command for Typer: each parameter whose type is a dataclass is replaced by the dataclass's fields.

    Every field has a default and is annotated like an option. Help lists the fields in the place of the parameter.
    """
    types = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}

    def parameters() -> Iterator[inspect.Parameter]:
        for parameter in inspect.signature(command).parameters.values():
            if group := groups.get(parameter.name):
                kinds = get_type_hints(group, include_extras=True)
                for field in fields(group):
                    yield _parameter(field.name, field.default, kinds[field.name])
            else:
                yield _parameter(parameter.name, parameter.default, types[parameter.name])

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(call)["__signature__"] = inspect.Signature([*parameters()])
    return call


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line, which are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _parameter(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
