"""The ``hpctrain`` program: the command line in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from typing import NoReturn

from hpctrain.common.stderr import tell

# A command is mostly imports, whose objects live to its end, so that collecting garbage among them only takes time.
_COLLECT_AFTER = 50_000


def program() -> NoReturn:
    """Run the command line, and end without freeing each object, because the system frees them all at once.

    Functions that are registered with :mod:`atexit` are called.
    """
    gc.set_threshold(_COLLECT_AFTER)
    _open_closed_streams()
    status = 1

    def leave() -> None:
        os._exit(_flush(status))

    # Registered first, so that it is called last.
    atexit.register(leave)
    from hpctrain.cli.main import main

    status = main()
    sys.exit(status)


def _open_closed_streams() -> None:
    """Give a closed stream the null device: the next file that is opened would get its number, and with it the output
    of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _flush(status: int) -> int:
    """Flush the streams, and return the exit status: 1 if nothing but this failed.

    The failure is printed, unless the reader has gone, or the command had failed before.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE and not status:
            tell(f"hpctrain: cannot write to stdout: {error.strerror}")
        status = status or 1
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    return status
