"""Writes the commit into wheels and source packages, for `hpctrain --version`."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds the file that `hpctrain/commit.py` reads; a source package without a checkout keeps the one it has."""

    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        # By its path: the package itself may lack its dependencies here.
        path = Path(self.root, "hpctrain", "commit.py")
        spec = importlib.util.spec_from_file_location("commit", path)
        assert spec and spec.loader
        commit = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(commit)
        if found := commit.of_checkout(Path(self.root)):
            self._folder = Path(tempfile.mkdtemp())
            (self._folder / commit.FILE).write_text(f"{found}\n")
            build_data["force_include"][str(self._folder / commit.FILE)] = f"hpctrain/{commit.FILE}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder:
            shutil.rmtree(self._folder)
