"""The ``hpctrain`` program: the command line in a process of its own."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import NoReturn

from hpctrain.cli.streams import close_streams, open_streams

# A command is mostly imports, whose objects live to its end, so that collecting garbage among them only takes time.
_COLLECT_AFTER = 50_000


def program() -> NoReturn:
    """Run the command line, and end without freeing each object, because the system frees them all at once.

    Functions that are registered with :mod:`atexit` are called.
    """
    gc.set_threshold(_COLLECT_AFTER)
    open_streams()
    status = 1

    def leave() -> None:
        os._exit(close_streams(status))

    # Registered first, so that it is called last.
    atexit.register(leave)
    from hpctrain.cli.main import main

    status = main()
    sys.exit(status)
