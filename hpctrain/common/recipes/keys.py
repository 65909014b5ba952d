"""The keys of a recipe's sections: the types of their values, and the kinds of a section that have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.files.checked_yaml import Section

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class CheckedSection(Section):
    """A section whose keys belong to kinds of it (:class:`Of`), need or exclude each other."""

    def faults(self) -> Iterator[str]:
        """What is wrong with the keys together."""
        yield from ()

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        for error in _foreign_keys(self):
            raise error
        if problem := next(self.faults(), None):
            raise InvalidValueError("HT-keys-not-together", "{problem}", problem=problem)
        return self


@dataclass(frozen=True)
class Of:
    """Marks a key that only some kinds of its section have.

    Attributes:
        decisive: the key of the section, dotted for one further inside that says of which kind it is.
        kinds: its values for which the key has an effect, separated by spaces.
        idle: whether the key may be given for other kinds too, so that ``--set`` can choose another.
    """

    decisive: str
    kinds: str
    idle: bool = False

    def kind(self, section: BaseModel) -> Any:
        """Which kind the section is of."""
        value: Any = section
        for key in self.decisive.split("."):
            value = getattr(value, key, None)
        return value

    def has(self, section: BaseModel) -> bool:
        """Whether the section is of a kind that has the key."""
        return self.kind(section) in self.kinds.split()


def kinds_of(field: FieldInfo) -> list[Of]:
    """What a key says about the kinds that have it."""
    return [mark for mark in field.metadata if isinstance(mark, Of)]


def enumerated(names: Sequence[str]) -> str:
    """``sgd, lars and lamb``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _foreign_keys(section: BaseModel) -> Iterator[InvalidValueError]:
    """The keys that were given to a section of another kind."""
    fields = type(section).model_fields
    for key, field in fields.items():
        for mark in kinds_of(field):
            # Sizes of a network by themselves have no name.
            decided = mark.decisive.partition(".")[0] in fields
            if not decided or mark.idle or mark.has(section) or getattr(section, key) == field.default:
                continue
            kind = mark.kind(section)
            others = [
                name
                for name, other in fields.items()
                if any(each.decisive == mark.decisive and each.has(section) for each in kinds_of(other))
            ]
            yield InvalidValueError(
                "HT-recipe-key-of-another",
                "{key} belongs to {owners}, not to {name}{has}",
                key=key,
                owners=enumerated(mark.kinds.split()),
                name=kind,
                has=f", which has {enumerated(others)}" if others else "",
            )


def used_values(work: BaseModel) -> dict[str, Any]:
    """The values of a recipe by key, without defaults that mean "none" and those of keys that have no effect.

    What is left is the same recipe when it is read again: only defaults are left out. A section's ``idle_keys`` are
    further ones without effect.
    """
    shown: dict[str, Any] = {}
    idle = getattr(work, "idle_keys", ())
    for key, dumped in work.model_dump(mode="json").items():
        field, value = type(work).model_fields[key], getattr(work, key)
        if value == field.get_default(call_default_factory=True) and (
            value in (None, "", ()) or key in idle or not all(mark.has(work) for mark in kinds_of(field))
        ):
            continue
        if isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
            shown[key] = [used_values(item) for item in value]
        else:
            shown[key] = used_values(value) if isinstance(value, BaseModel) else dumped
    return shown
