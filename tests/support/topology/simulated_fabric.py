"""What a test gets of a fabric that ibsim simulates."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A fabric under ibsim, which opensm has brought up.

    Attributes:
        tree: what ``fat_tree`` made it of.
        folder: for files of the test.
    """

    tree: dict[str, Any]
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """What a tool prints on this fabric."""
        done = subprocess.run(
            ["ibsim-run", *command], env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout
