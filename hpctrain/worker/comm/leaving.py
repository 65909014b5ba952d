"""Leaves the run at the interpreter's exit, ahead of the exit handlers of libraries that the run uses.

Handlers run in the reverse order of their registration, so this one is registered again after such a library has
registered its own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

_leave: Callable[[], None] | None = None


def leave_at_exit(leave: Callable[[], None]) -> None:
    """Call ``leave`` at the interpreter's exit, ahead of all handlers registered so far. Idempotent."""
    global _leave
    _leave = leave
    leave_first()


def leave_first() -> None:
    """Move what :func:`leave_at_exit` got, if anything, ahead of the handlers that were registered since."""
    if _leave is not None:
        atexit.unregister(_leave)
        atexit.register(_leave)
