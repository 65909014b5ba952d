"""Reads the facts about the installed Horovod from its files, without importing it."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass

from hpctrain.control.horovod import METADATA_KEYS
from hpctrain.control.horovod.cuda import package_directory
from hpctrain.control.horovod.fingerprint import BuildFingerprint


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The Horovod of this environment; ``fingerprint`` is None where something other than hpctrain built it."""

    version: str
    packages: tuple[str, ...]
    fingerprint: BuildFingerprint | None


def find_installed() -> Installed | None:
    """The Horovod of this environment, if there is one."""
    directory = package_directory("horovod")
    if directory is None:
        return None
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        # Only a folder of that name is on the module path, such as Horovod's sources.
        return None
    path = directory / "metadata.json"
    metadata = json.loads(path.read_text()) if path.is_file() else {}
    record = metadata.get("hpctrain")
    return Installed(
        version=version,
        packages=tuple(package for package, key in METADATA_KEYS.items() if key in metadata),
        fingerprint=BuildFingerprint(**record) if record else None,
    )
