"""The end of the program: nothing is lost by its being quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A command that prints more than a pipe holds, and leaves work to the end of the process.
_COMMAND = """
import atexit, sys, tempfile, weakref
import hpctrain.cli.main as module
from hpctrain.cli.program import program

class Left: ...
left = Left()

def main():
    weakref.finalize(left, print, "finalized")
    atexit.register(print, "called at the end")
    print("x" * 1_000_000)
    if sys.argv[1:]:
        raise ValueError("a defect")
    return 4

module.main = main
program()
"""


@pytest.mark.parametrize(("arguments", "status"), [((), 4), (("raise",), 1)])
def test_all_output_and_all_that_is_left_to_the_end_comes_with_the_status(arguments, status):
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert sorted(ended.stdout.split("\n")) == ["", "called at the end", "finalized", "x" * 1_000_000]
    assert ("ValueError: a defect" in ended.stderr) == (status == 1)


@pytest.mark.parametrize(("arguments", "status"), [(("--version",), 0), (("run", "digit"), 2)])
def test_the_module_ends_with_the_status_of_its_command(arguments, status):
    ended = subprocess.run([sys.executable, "-m", "hpctrain", *arguments], capture_output=True, timeout=60, check=False)
    assert ended.returncode == status
