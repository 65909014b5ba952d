"""``hpctrain run --dry-run``."""

from __future__ import annotations

import sys

import typer

from hpctrain.launch.attempts import Attempt
from hpctrain.launch.by_hand import shell_text
from hpctrain.launch.command import Launcher
from hpctrain.launch.launcher_choice import needs_proof
from hpctrain.planning.machine import Machine
from hpctrain.report.say import say
from hpctrain.run.directory import RunDirectory
from hpctrain.run.plan import Plan
from hpctrain.supervision.start import command_for


def show_command(
    plan: Plan, directory: RunDirectory, attempt: Attempt | None, machine: Machine, launcher: Launcher | None
) -> int:
    """Print the commands of a run for a shell; returns the exit code. ``attempt`` is None for a new run."""
    command = command_for(plan, directory, machine, launcher)
    typer.echo(shell_text(command, plan, directory, attempt, launcher.name if launcher else "none"))
    if launcher and needs_proof(plan):
        say(f"hpctrain: {launcher.name} is the first in order, and was not tried; a run takes what works", sys.stderr)
    return 0
