"""Python's debugger in the ranks of a script: in rank 0, on the terminal of ``hpctrain run --pdb``, or nowhere."""

from __future__ import annotations

import bdb
import os
import pdb
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import DEBUGGER

# How long rank 0 may be without a prompt until an error of another rank ends the run.
_WAIT_SECONDS = 5.0

_here = False
# It is there while rank 0 shows a prompt.
_prompt: Path | None = None


def use_debugger(rank: int, prompt: Path) -> None:
    """Prepare this rank, if the run is debugged: rank 0 gets the terminal, and the others pass over breakpoints.

    Args:
        prompt: the file by which rank 0 tells the others that somebody is at work at its prompt.

    Raises:
        HpctrainError: this is rank 0, and the terminal cannot be had.
    """
    global _here, _prompt
    terminal = DEBUGGER.read()
    _prompt = prompt if terminal else None
    if terminal and rank == 0:
        _take(terminal)
        _show_prompt_to_others(prompt)
        _here = True
    elif terminal:
        sys.breakpointhook = pdb.set_trace = _go_on
    elif "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _refuse


def look_at(error: BaseException, trace: TracebackType | None) -> None:
    """Open the debugger where an error was raised, in a rank that has a terminal; others wait while there is a prompt.

    Rank 0 may have the same error, or be looked at just now, and this one's would take its terminal away.
    """
    if _prompt and not _here:
        _wait_behind(_prompt)
    if _here and trace and not isinstance(error, KeyboardInterrupt | bdb.BdbQuit):
        pdb.post_mortem(trace)


def _show_prompt_to_others(prompt: Path) -> None:
    interact = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *arguments: Any) -> None:
        prompt.touch()
        try:
            interact(self, *arguments)
        finally:
            prompt.unlink(missing_ok=True)

    pdb.Pdb.interaction = interaction  # type: ignore[assignment,method-assign]


def _wait_behind(prompt: Path) -> None:
    seen = time.monotonic()
    while time.monotonic() - seen < _WAIT_SECONDS:
        if prompt.exists():
            seen = time.monotonic()
        time.sleep(_WAIT_SECONDS / 10)


def _take(terminal: str) -> None:
    """Make the terminal this process's three streams, as for a program that was started there."""
    host, _, path = terminal.partition(":")
    try:
        if host != socket.gethostname():
            raise OSError(0, f"it is one of {host}")
        descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        raise HpctrainError(
            "HT-pdb-no-terminal",
            "rank 0 on {host} cannot open the terminal {path}: {reason}",
            "start `hpctrain run --pdb` on the first host (rank 0), outside of containers that hide its terminals",
            host=socket.gethostname(),
            path=path,
            reason=error.strerror,
        ) from error
    for stream in range(3):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _go_on(*_: object, **__: object) -> None:
    """Meet rank 0 at the next collective call."""


def _refuse(*_: object, **__: object) -> None:
    """Say how to debug; Python's own debugger would end at once, because nobody can answer it."""
    raise HpctrainError(
        "HT-pdb-no-terminal",
        "breakpoint(): a rank of a run has no terminal",
        "hpctrain run SCRIPT.py --pdb lends it the one that the run is started on; the variable PYTHONBREAKPOINT names "
        "another debugger, such as remote_pdb.set_trace, or 0 for none",
    )
