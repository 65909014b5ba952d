"""What pyproject.toml asks for, and what pip installs for that."""

from __future__ import annotations

import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.pages import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def closure(requirements: list[str]) -> set[str]:
    """The distributions that pip installs for them."""
    found: set[str] = set()
    wanted = [Requirement(each) for each in requirements]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in found or (requirement.marker and not requirement.marker.evaluate()):
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(Requirement(text.partition(";")[0]))
    return found
