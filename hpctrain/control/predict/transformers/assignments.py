"""``KEY=VALUE``, as ``--set`` and ``--transformer`` have it, for fields of a dataclass."""

from __future__ import annotations

from typing import Any

from hpctrain.common.errors import HpctrainError, nearest

# Python refuses to read thousands of digits.
_DIGITS = 18


def read_value(text: str, key: str, value: str, *, kind: str, choices: tuple[object, ...] = ()) -> Any:
    """The value of a field.

    Args:
        text: what is read, for error messages.
        kind: the name of the field's type.
        choices: the valid ones where there are few.

    Raises:
        HpctrainError: it is none of that type.
    """
    choices = (False, True) if kind == "bool" else choices
    if choices:
        by_name = {str(choice).lower() if kind == "bool" else str(choice): choice for choice in choices}
        if value not in by_name:
            raise HpctrainError(
                "HT-choice-unknown",
                "{text}: {key} is {value!r}",
                nearest(value, tuple(by_name)),
                text=text,
                key=key,
                value=value,
            )
        return by_name[value]
    if kind != "int":
        return value
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        raise HpctrainError(
            "HT-option-bad-value",
            "{text}: {key} is {value!r}, not a whole number of at least 0",
            text=text,
            key=key,
            value=value,
        )
    return int(value)
