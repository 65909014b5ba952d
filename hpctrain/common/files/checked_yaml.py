"""YAML files that a pydantic model describes; errors name line, key and valid values."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError

from hpctrain.common.errors import HpctrainError, InvalidValueError, joined, nearest

Location = tuple[int | str, ...]


class Section(BaseModel):
    """A section of such a file: unknown keys are refused, and values cannot change after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def defaults(cls) -> Self:
        """A section that a file leaves out. It is not checked, so that pydantic need not build what checks it."""
        return cast(Self, cls.model_construct())


M = TypeVar("M", bound=BaseModel)

LONGEST_FILE = 2**18
"""Bytes of such a file. The longest that is published has some thousands."""

# Describing a fault searches the whole file, and nobody corrects more of them at once.
_MOST_FAULTS = 50


class _Reader(yaml.SafeLoader):
    """YAML's safe loader without tags and aliases, which can be circular or grow without bounds, and with the decimal
    numbers of YAML 1.2: ``1e-4`` is one, and ``1:30``, ``0x1f``, ``1_000`` and dates are none.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise ComposerError(None, None, f"the alias *{event.anchor} has no place here", mark)
        if tag := getattr(event, "tag", None):
            raise ComposerError(None, None, f"the tag {tag} has no place here", mark)
        return super().compose_node(parent, index)


_Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# At most 18 digits, which no number of these files needs: Python refuses to read thousands of them.
_Reader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\Z"), list("-+0123456789"))
_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z"
    ),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that PyYAML's loader or the one above would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Reader.yaml_implicit_resolvers.get(first, [])
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Reader.yaml_implicit_resolvers}
}


def load_checked(text: str, path: Path, model: type[M], kind: str, hint: str) -> M:
    """Load a file into its model.

    Args:
        kind: what such a file is called, without its article.
    """
    document = read_document(text, path, kind)
    return validate(document.values, model, document.where, kind, hint)


def load_shipped(path: Path, model: type[M]) -> M:
    """Load a file of this installation; errors are those of :func:`load_checked`."""
    return load_checked(path.read_text(encoding="utf-8"), path, model, "file of hpctrain", "reinstall hpctrain")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The values of a file before a model has checked them.

    Attributes:
        where: the file and line of the value at a location, or of the deepest part of it that the file holds.
    """

    values: Any
    where: Callable[[Location], str]


def read_document(text: str, path: Path, kind: str) -> Document:
    """Parse a file whose top level is a mapping; arguments and errors are those of :func:`load_checked`."""
    root = _parse(text, path)
    if not isinstance(root, yaml.MappingNode):
        raise HpctrainError(
            "HT-file-no-mapping",
            "{path} holds no {kind}: its top level is not a mapping of keys to values",
            path=path,
            kind=kind,
        )
    _refuse_duplicates(root, path)
    return Document(values=_value(root, path), where=lambda location: f"{path}:{_line(root, location)}")


def dump(values: dict[str, Any]) -> str:
    """Write plain values as YAML, in their order; :func:`load_checked` reads them back."""
    # A width that no line reaches: folded lines are hard to edit. Left unescaped, U+0085 comes back as a line break.
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=2**16))


class _ManifestDumper(_Dumper):
    """Quotes what Kubernetes' reader takes for something else too, and writes texts of several lines as such."""


# Source: resolve.go of go-yaml 2, which sigs.k8s.io/yaml reads with.
_NO_TEXT_OF_GO = re.compile(r"[yYnN]|[-+]?0o[0-7_]+")


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NO_TEXT_OF_GO.fullmatch(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ManifestDumper.add_representer(str, _represent_text)


def dump_all(documents: Sequence[Mapping[str, Any]]) -> str:
    """Write the manifests of Kubernetes as YAML, one document each."""
    written = [yaml.dump(document, Dumper=_ManifestDumper, sort_keys=False, width=2**16) for document in documents]
    return "---\n".join(written)


def parse_value(text: str, where: str) -> Any:
    """The value of one line of YAML."""
    root = _parse(text, where)
    return None if root is None else _value(root, where)


def validate(values: Any, model: type[M], where: Callable[[Location], str], kind: str, hint: str) -> M:
    """Validate plain values with a model.

    Args:
        where: to look for the value at a location.
        kind: what the whole is called, without its article.
    """
    try:
        # Validated as JSON, because only then does pydantic's strict mode accept a list for a tuple.
        return model.model_validate_json(json.dumps(values, default=repr))
    except ValidationError as error:
        errors = error.errors()
        faults = [_fault(fault, model, where(fault["loc"]), kind) for fault in errors[:_MOST_FAULTS]]
        raise joined(faults, hint, more=len(errors) - len(faults)) from error


def subsection(section: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section under a key; None if the key holds a value."""
    annotation = section.model_fields[key].annotation
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _parse(text: str, place: object) -> yaml.Node | None:
    with _valid_yaml(place):
        return _Reader(text).get_single_node()


def _value(root: yaml.Node, place: object) -> Any:
    with _valid_yaml(place):
        return _Reader("").construct_document(root)


@contextlib.contextmanager
def _valid_yaml(place: object) -> Iterator[None]:
    """Make an error that names the place of what PyYAML refuses, and of what is nested too deep for Python's stack."""
    try:
        yield
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = "nested too deep" if isinstance(error, RecursionError) else getattr(error, "problem", error)
        raise HpctrainError(
            "HT-file-not-yaml",
            "{where}: not valid YAML: {problem}",
            where=f"{place}:{mark.line + 1}" if mark else place,
            problem=str(problem),
        ) from error


def _refuse_duplicates(node: yaml.Node, path: Path) -> None:
    """YAML forbids a key that is given twice; PyYAML takes the last in silence."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise HpctrainError(
                "HT-file-key-twice",
                "{where}: the key {key!r} was already given in line {first_line}",
                where=f"{path}:{line}",
                key=key.value,
                first_line=seen[key.value],
            )
        seen[key.value] = line
        _refuse_duplicates(value, path)


def _line(node: yaml.Node, location: Location) -> int:
    """The line of the deepest part of ``location`` that the file holds, from 1."""
    line = node.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == part]
            if not pairs:
                break
            line, node = pairs[0][0].start_mark.line, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return int(line) + 1


def _fault(fault: ErrorDetails, model: type[BaseModel], where: str, kind: str) -> HpctrainError:
    *parents, last = fault["loc"] or (f"the {kind}",)
    key = ".".join(map(str, (*parents, last)))
    refusal = fault.get("ctx", {}).get("error")
    if isinstance(refusal, InvalidValueError):
        return refusal.at(where=where, key=key).but(before=f"{where}: {key}: ")
    values: dict[str, Any] = {"where": where, "key": key, "value": reprlib.repr(fault["input"])}
    match fault["type"]:
        case "extra_forbidden":
            section = subsection(model, "root") if issubclass(model, RootModel) else model
            # A file that is a list has the section of its items. A number is a place in a list, whose items are
            # what the key before it leads to.
            for part in (part for part in parents if isinstance(part, str)):
                assert section is not None
                section = subsection(section, part)
            assert section is not None
            choices = nearest(str(last), section.model_fields)
            return HpctrainError(
                "HT-file-unknown-key", "{where}: unknown key {key!r}; {choices}", where=where, key=key, choices=choices
            )
        case "missing":
            return HpctrainError("HT-file-missing-key", "{where}: the key {key!r} is missing", where=where, key=key)
        case "value_error":
            # The value may be a secret, which is why it was refused.
            return HpctrainError(
                "HT-file-value", "{where}: {key}: {problem}", where=where, key=key, problem=str(refusal)
            )
        case "string_type" if isinstance(fault["input"], (bool, int, float)):
            return HpctrainError(
                "HT-file-value", "{where}: {key}: input should be a string, not {value}: put it in quotes", **values
            )
        case _:
            problem = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}"
            return HpctrainError("HT-file-value", "{where}: {key}: {problem}, not {value}", problem=problem, **values)
