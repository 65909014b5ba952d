"""The type of the fixtures that start processes; tests/conftest.py documents them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Launch = Callable[..., subprocess.CompletedProcess[str]]
