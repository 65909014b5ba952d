"""How tests start processes: the type of the fixtures that tests/conftest.py documents, and what ranks begin with."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from support.startup import warm_start

# Open MPI's own words for what it asks of root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
Launch = Callable[..., subprocess.CompletedProcess[str]]

STARTUP = Path(__file__).with_name("startup")


@contextlib.contextmanager
def warm_interpreters() -> Iterator[None]:
    """Start the interpreters in which the ranks of this process, and of those that it starts, begin."""
    # startup/sitecustomize.py in every process that tests start, pytest's own workers and the jobs of Slurm included.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))
    folder = tempfile.mkdtemp(prefix="hpctrain-warm-")
    program = Path(__file__).with_name("warm_interpreters.py")
    with (Path(folder) / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, program, str(os.getpid()), folder], stdout=log, stderr=log)
    os.environ[warm_start.DIRECTORY] = folder
    try:
        yield
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)
