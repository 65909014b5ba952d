"""Prints a run as text for a shell, as ``hpctrain run --dry-run`` does; executing it gives the same run."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import line_of
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.command import Command
from hpctrain.control.resuming.attempts import Attempt


def shell_text(command: Command, plan: Plan, directory: RunDirectory, attempt: Attempt | None, launcher: str) -> str:
    """Text for a POSIX shell: it prepares the run directory for the ranks, then runs the command.

    Args:
        command: starts the ranks.
        plan: of the run.
        directory: of the run.
        attempt: how a run goes on that is there already; None for a new one, which the shell refuses to begin where
            there is another's plan.
        launcher: its name.
    """
    folder = RunDirectory(directory.path.absolute())
    steps = [
        # The directory is its owner's alone; and with -C no file is written over.
        f"umask 077{'' if attempt else ' && set -C'}",
        f"mkdir -p {_words(folder.logs, folder.ranks)}",
        f"printf '%s\\n' {shlex.quote(plan.model_dump_json())} > {_words(folder.plan)}",
    ]
    if attempt:
        # From which checkpoint the ranks go on. No launcher of hpctrain's will live anywhere.
        written = hashlib.sha256(f"{plan.model_dump_json()}\n".encode()).hexdigest()
        start = attempt.start(plan, launcher).model_copy(update={"host": None, "pid": None, "plan": written})
        steps += [
            f"rm -f {_words(folder.stop, folder.summary)} {_words(folder.ranks)}/rank-*.json",
            f"printf '%s\\n' {shlex.quote(line_of(start).decode().rstrip())} >> {_words(folder.events)}",
        ]
    prepared = " &&\n ".join(steps)
    return f"({prepared}) &&\n{command.shell()}"


def _words(*paths: Path) -> str:
    return shlex.join(map(str, paths))
