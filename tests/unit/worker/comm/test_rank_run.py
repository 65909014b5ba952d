"""The run is left ahead of the exit handlers of libraries that it uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
from hpctrain.worker.comm.rank_run import run
run.leave_first()  # nothing to move yet
atexit.register(print, "loaded before")
run.leave_at_exit(lambda: print("left"))
atexit.register(print, "loaded after")
run.leave_first()
run.leave_first()
"""


@pytest.mark.slow
def test_the_run_is_left_ahead_of_handlers_that_were_registered_later():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["left", "loaded after", "loaded before"]
