"""Parses YAML from outside with a bound on nesting, and refuses what the format does not use."""

from __future__ import annotations

from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError


class BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader with a bound on nesting, which would exhaust Python's stack, and a check of each node.

    Attributes:
        deepest: how many nodes may lie within each other.
    """

    deepest: ClassVar[int]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def refusal(self, event: Any) -> str | None:
        """Why the node that begins with ``event`` is not allowed; None if it is."""
        raise NotImplementedError

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        why = self.refusal(event)
        if why is None and self._depth == self.deepest:
            why = f"nested more than {self.deepest} deep"
        if why:
            raise ComposerError(None, None, why, event.start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node
