"""The exceptions that users of hpctrain are meant to see."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Self

# How many of the counted things a warning names.
_NAMED = 3
# More choices than these that begin alike are no guess.
_MEANT = 3
# A likeness of two names by difflib that only a typing error explains.
_TYPING_ERROR = 0.9


class HpctrainError(Exception):
    """A mistake that the user can correct, or a fault of the machine that they should know of.

    The command line prints it without a traceback. ``docs/reference/errors.md`` lists every code.

    Args:
        code: the stable name of this kind of error, ``HT-…``.
        sentence: what was wrong and where (file and line, key, host), as a format string of the values.
        hint: the valid choices, or the command that corrects it.
        exit_code: 2 for wrong use, 1 for a run that failed, 3 for a check that found a fault.
        values: what the sentence is made from, by name.
    """

    # Keras adds the arguments of a layer's call to an error by making another of its class from one text: not of these.
    _keras_call_info_injected = True

    def __init__(self, code: str, sentence: str, hint: str = "", /, *, exit_code: int = 2, **values: Any) -> None:
        self.code = code
        self.message = sentence.format(**values)
        self.hint = hint
        self.exit_code = exit_code
        self.values = values
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        # In front, where it stands apart from further lines, and from a command at a sentence's end.
        return f"error[{self.code}]: {self.advice}"

    @property
    def advice(self) -> str:
        """The message with its hint, for a text that names the code elsewhere."""
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self),), self.__dict__

    def but(self, *, before: str = "", hint: str | None = None, exit_code: int | None = None) -> Self:
        """The same error, with text before its message, another hint or another exit code."""
        other = copy.copy(self)
        other.message = before + self.message
        other.hint = self.hint if hint is None else hint
        other.exit_code = self.exit_code if exit_code is None else exit_code
        return other

    def record(self) -> dict[str, Any]:
        """The error as JSON has it; :meth:`from_record` makes it again."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
            "values": json.loads(json.dumps(self.values, default=_plain), parse_constant=str),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The error of a process of hpctrain that recorded it."""
        made = cls.__new__(cls)
        made.__dict__.update(record)
        return made


class InvalidValueError(ValueError):
    """A value that a pydantic model refuses; arguments are those of :class:`HpctrainError`.

    The file's reader makes the error that the user sees, with the place of the value.
    """

    def __init__(self, code: str, sentence: str, /, **values: Any) -> None:
        super().__init__(sentence.format(**values))
        self.code = code
        self.sentence = sentence
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def at(self, **place: Any) -> HpctrainError:
        """The error that the user sees, with the values of its place beside its own."""
        return HpctrainError(self.code, self.sentence, **{**place, **self.values})


class TransientError(HpctrainError):
    """A fault that another attempt will probably not see, such as flipped bits or lost ranks."""


def joined(faults: Sequence[HpctrainError], hint: str, *, more: int = 0) -> HpctrainError:
    """The only fault of a file; for several, one error with their codes and values, each once."""
    if len(faults) == 1 and not more:
        return faults[0].but(hint=hint)
    found: list[dict[str, Any]] = []
    for fault in faults:
        if fault.code == "HT-file-faults":
            found += fault.values["faults"]
            more = max(more, fault.values["more"])
        else:
            found.append({"code": fault.code, "message": fault.message, "values": fault.values})
    different = {each["message"]: each for each in found}
    lines = [*different, *([f"and {more} more faults"] if more else [])]
    return HpctrainError(
        "HT-file-faults", "{lines}", hint, lines="\n".join(lines), faults=[*different.values()], more=more
    )


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence with the valid choices, beginning with those that the user probably meant."""
    known = sorted(choices)
    begun = [choice for choice in known if name and choice.startswith(name)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=_TYPING_ERROR)
    close = close or (begun if len(begun) <= _MEANT else []) or difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{meant}valid: {', '.join(known)}"


def counted(what: str, names: Sequence[str]) -> str:
    """A warning about many things of one kind."""
    return f"{what} ({len(names)}): {abbreviated(names)}"


def abbreviated(names: Sequence[str], most: int = _NAMED) -> str:
    """The first of many names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _plain(value: Any) -> Any:
    """A value of a type that JSON does not have: NumPy's numbers, sets, and whatever else has a text."""
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)
    return [*value] if isinstance(value, (set, frozenset)) else str(value)
