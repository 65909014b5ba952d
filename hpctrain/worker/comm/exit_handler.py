"""Leaves the run at the interpreter's exit, before the exit handlers of the libraries that the run uses.

Handlers run in the reverse order of their registration, so this one is registered again after each such library.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

_leave: Callable[[], None] | None = None


def leave_at_exit(leave: Callable[[], None]) -> None:
    """Call ``leave`` at the interpreter's exit, before all handlers registered so far. Idempotent."""
    global _leave
    _leave = leave
    leave_first()


def leave_first() -> None:
    """Register the handler of :func:`leave_at_exit`, if any, again, so that it runs before all others."""
    if _leave is not None:
        atexit.unregister(_leave)
        atexit.register(_leave)


def forget() -> None:
    """Leave the run no more at the interpreter's exit, in a rank that failed: leaving waits for the other ranks."""
    if _leave is not None:
        atexit.unregister(_leave)
