"""The terminal of ``hpctrain run --pdb``, which rank 0 uses as its own."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import termios
from collections.abc import Iterator

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import DEBUGGER, STALL, TIMEOUT

# The others wait for as long as somebody may think.
_SECONDS = str(7 * 24 * 3600)


@contextlib.contextmanager
def lent_terminal(*, to_script: bool, dry_run: bool) -> Iterator[None]:
    """Lend this terminal to rank 0, and have it back as it was.

    Raises:
        HpctrainError: there is no terminal, or nothing to debug.
    """
    streams = {"stdin": sys.stdin, "stdout": sys.stdout}
    missing = [name for name, stream in streams.items() if stream is None or not stream.isatty()]
    why = "a dry run" if dry_run else "a recipe" if not to_script else f"a {missing[0]} that is none" if missing else ""
    if why:
        raise HpctrainError(
            "HT-pdb-no-terminal",
            "--pdb debugs a script on this terminal, and cannot be used with {what}",
            "hpctrain run SCRIPT.py --pdb, in a terminal, without redirections; in a job: srun --pty or salloc",
            what=why,
        )
    before = termios.tcgetattr(0)
    os.environ[DEBUGGER.name] = f"{socket.gethostname()}:{os.ttyname(0)}"
    os.environ[TIMEOUT.name] = os.environ[STALL.name] = _SECONDS
    try:
        yield
    finally:
        # A rank that was ended at the prompt leaves the terminal without an echo. It may also be gone.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)
