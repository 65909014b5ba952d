"""Prints a run's measured figures beside its prediction."""

from __future__ import annotations

import sys

from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.page import read_comparison
from hpctrain.report.say import say


def print_comparison(directory: RunDirectory) -> None:
    """Print the comparison on stderr; nothing without a prediction.

    Raises:
        HpctrainError: the directory holds no run.
    """
    comparison, fault = read_comparison(directory)
    if fault:
        say(f"hpctrain: warning: {fault}", sys.stderr)
    for line in comparison.lines if comparison else ():
        say(line, sys.stderr)
