"""XML about a host: its elements know the file that they are from, for messages."""

from __future__ import annotations

import re
from functools import partial
from typing import cast
from xml.etree import ElementTree

from hpctrain.common.errors import HpctrainError


def not_valid(where: str, problem: str, remedy: str = "") -> HpctrainError:
    """The error for a file about a host that no tool writes so."""
    return HpctrainError("HT-node-file-not-valid", "{where}: {problem}", remedy, where=where, problem=problem)


class Element(ElementTree.Element):
    """One element; ``where`` is its file."""

    def __init__(self, where: str, tag: str, attributes: dict[str, str]) -> None:
        super().__init__(tag, attributes)
        self.where = where

    def all(self, tag: str) -> list[Element]:
        """The children of that tag."""
        return cast(list[Element], self.findall(tag))

    def attribute(self, name: str) -> str:
        """An attribute that the format requires; a missing one is an error."""
        value = self.get(name)
        if value is None:
            raise not_valid(self.where, f"<{self.tag}> lacks the attribute {name!r}")
        return value

    def number(self, name: str, *, least: int = 0) -> int:
        """An attribute that is a whole number; one that is missing, not a number, or below ``least`` is an error."""
        value = self.attribute(name)
        if not re.fullmatch("-?[0-9]{1,9}", value) or int(value) < least:
            raise not_valid(self.where, f"<{self.tag}> has {name}={value[:40]!r}, not a number from {least}")
        return int(value)


def parse(text: str, where: str, *, root: str, remedy: str) -> Element:
    """The root element of a text. Expat itself refuses entities that grow to more than a hundred times the text.

    Args:
        where: the file's name, for messages.
        root: the tag that it must have.
        remedy: how the user gets a file of the right format.

    Raises:
        HpctrainError: not XML, cut short, or with another root.
    """
    builder = ElementTree.TreeBuilder(element_factory=partial(Element, where))
    # The text was decoded already, whatever encoding its first line names.
    parser = ElementTree.XMLParser(target=builder, encoding="utf-8")  # noqa: S314
    try:
        parser.feed(text.encode(errors="replace"))
        element = cast(Element, parser.close())
    except ElementTree.ParseError as error:
        raise not_valid(f"{where}:{error.position[0]}", error.msg.partition(":")[0], remedy) from error
    if element.tag != root:
        raise not_valid(where, f"expected <{root}>, found <{element.tag}>", remedy)
    return element
