"""Keys that only some kinds of a section have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpctrain.common.files.checked_yaml import Section


class SectionOfKind(Section):
    """A section whose ``name`` decides which of its keys are used.

    Attributes:
        own_keys: the names that use a key, for each key that not all use.
    """

    own_keys: ClassVar[Mapping[str, Sequence[str]]]

    name: Any

    def uses(self, key: str) -> bool:
        """Whether the section's kind uses a key."""
        return self.name in self.own_keys.get(key, (self.name,))


def require_own_keys(section: Section, name: str, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys that the kind of a section does not use.

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
