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
{further}
"""


def order(further: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(further=further)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_handlers_registered_later_run_first_unless_the_run_is_moved_ahead_of_them():
    assert order("") == ["loaded after", "left", "loaded before"]
    assert order("run.leave_first()") == ["left", "loaded after", "loaded before"]
    assert order("run.leave_first(); run.leave_first()") == ["left", "loaded after", "loaded before"]
