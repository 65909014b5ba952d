"""Records of a file, made into a fabric."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpctrain.topology.fabric import Fabric
from hpctrain.topology.records import Record


def build_fabric(records: Iterable[Record]) -> Fabric:
    """The fabric that the records describe."""
    raise NotImplementedError


def read_fabric(path: Path, routes: Path | None = None) -> Fabric:
    """The fabric of a file whose format is found by its content."""
    raise NotImplementedError
