"""Keys that some kinds of a section have, and others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.checked_yaml import Section


def require_own_keys(section: Section, name: str, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse what a section was given and its kind has no use for.

    Args:
        section: is of the kind ``name``.
        owners: the names that use a key, for each key that not all use.

    Raises:
        ValueError: a key of another name has not its default.
    """
    fields = type(section).model_fields
    for key, names in owners.items():
        if name not in names and getattr(section, key) != fields[key].default:
            raise ValueError(f"{key} belongs to {_joined(names)}, not to {name}")


def _joined(names: Sequence[str]) -> str:
    """``sgd, lars and lamb``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
