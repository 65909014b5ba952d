"""XML with the line of each element, for messages. Entities are refused: no format read here declares any."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from hpctrain.common.errors import HpctrainError


def not_valid(where: str, problem: str, remedy: str = "") -> HpctrainError:
    """The error for a file about a host that no tool writes so."""
    return HpctrainError("HT-node-file-not-valid", "{where}: {problem}", remedy, where=where, problem=problem)


@dataclass(slots=True, kw_only=True)
class Element:
    """One element; ``text`` has the characters directly in it, and ``where`` is its file and line."""

    tag: str
    attributes: dict[str, str]
    where: str
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str) -> list[Element]:
        """The children of that tag."""
        return [child for child in self.children if child.tag == tag]

    def attribute(self, name: str) -> str:
        """An attribute that the format requires; a missing one is an error."""
        if name not in self.attributes:
            raise not_valid(self.where, f"<{self.tag}> lacks the attribute {name!r}")
        return self.attributes[name]

    def number(self, name: str, *, least: int = 0) -> int:
        """An attribute that is a whole number; one that is missing, not a number, or below ``least`` is an error."""
        value = self.attribute(name)
        if not re.fullmatch("-?[0-9]{1,9}", value) or int(value) < least:
            raise not_valid(self.where, f"<{self.tag}> has {name}={value[:40]!r}, not a number from {least}")
        return int(value)


def parse(text: str, where: str, *, root: str, remedy: str) -> Element:
    """The root element of a text.

    Args:
        where: the file's name, for messages.
        root: the tag that it must have.
        remedy: how the user gets a file of the right format.

    Raises:
        HpctrainError: not XML, cut short, with entities, or with another root.
    """
    top = Element(tag="", attributes={}, where=where)
    open_elements = [top]
    parser = expat.ParserCreate("utf-8")

    def here() -> str:
        return f"{where}:{parser.CurrentLineNumber}"

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag=tag, attributes=attributes, where=here())
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def end(_: str) -> None:
        open_elements.pop()

    def characters(data: str) -> None:
        open_elements[-1].text += data

    def entity(name: str, *_: object) -> None:
        raise not_valid(here(), f"declares the entity {name!r}, which no <{root}> file does", remedy)

    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    parser.EntityDeclHandler = entity
    try:
        parser.Parse(text.encode(errors="replace"), True)
    except expat.ExpatError as error:
        raise not_valid(f"{where}:{error.lineno}", expat.ErrorString(error.code), remedy) from error
    [element] = top.children
    if element.tag != root:
        raise not_valid(element.where, f"expected <{root}>, found <{element.tag}>", remedy)
    return element
