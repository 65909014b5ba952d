"""The end of a script that fails on a rank: what Python itself does then, before this rank ends all others.

The others may wait for this rank in a collective for ever, so that it cannot leave as a program of its own does: MPI
and Horovod would wait for the other ranks to leave too.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import Script
from hpctrain.worker import comm
from hpctrain.worker.comm import forks, leaving

# What the exception hook and the exit handlers of a script may take, each. The launcher waits for longer.
_SECONDS = 10.0

_script: Script | None = None


def begin(script: Script) -> None:
    """Prepare for the end of a script. Whatever hook it installs is called for its errors."""
    global _script
    _script = script
    comm.leave_errors_to_caller()
    # It runs after what the script registers. Python itself would miss files that only frozen objects hold.
    atexit.register(forks.close_files)
    sys.excepthook = _print


def show(error: BaseException) -> None:
    """Show an error as the script wants it to be shown: by ``sys.excepthook``."""
    # Hooks may read it there too.
    error.__traceback__ = from_script(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        # Python prints both, too.
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
            _print(type(error), error, error.__traceback__)


def finish() -> None:
    """Do what Python does at the end of a program: wait for threads, and run exit handlers, which close files."""
    if _script is None:
        return
    leaving.forget()
    with contextlib.suppress(BaseException):
        forks.run_exit_handlers()


@contextlib.contextmanager
def limited(give_up: Callable[[], object]) -> Iterator[None]:
    """Call ``give_up`` from another thread where what is done here takes too long."""
    timer = threading.Timer(_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, HpctrainError):
        print(f"hpctrain: {error}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)
        print(explanation(error), end="", file=sys.stderr)


def explanation(error: BaseException) -> str:
    """A line on what one of PyTorch's own errors means to a script; empty if it needs no explanation."""
    if parallel := sys.modules.get("hpctrain.worker.adapters.torch.parallel.division"):
        explained: str = parallel.of_divided_tensors(error)
        return explained and f"hpctrain: {explained}\n"
    return ""


def from_script(error: BaseException) -> TracebackType | None:
    """The part of an error's traceback that begins in the user's script, without hpctrain's frames above it."""
    if _script and isinstance(error, SyntaxError) and error.filename == str(_script.path):
        # A syntax error names its place itself, and nothing of the script was executed.
        return None
    start = error.__traceback__
    while _script and start and start.tb_frame.f_code.co_filename != str(_script.path):
        start = start.tb_next
    return start or error.__traceback__
