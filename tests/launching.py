"""The type of the fixtures that start processes, which tests/conftest.py documents, and what they pass to mpirun."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

# Open MPI's own words for what it asks of root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Launch = Callable[..., subprocess.CompletedProcess[str]]
