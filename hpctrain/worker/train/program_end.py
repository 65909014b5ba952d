"""How a rank ended, and the end of a script that fails: what Python itself does then, before this rank ends all others.

The others may wait for this rank in a collective for ever, so that it cannot leave as a program of its own does: MPI
and Horovod would wait for the other ranks to leave too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.run import stopping
from hpctrain.common.run.plan import Script
from hpctrain.common.run.records import OwnTraining, RankError
from hpctrain.common.stderr import tell, tell_error
from hpctrain.worker import comm
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.timeout import Timeout

# What the exception hook and the exit handlers of a script may take, each. The launcher waits for longer.
_SECONDS = 10.0

# How many ranks look in a second for the file by which the launcher passes on Ctrl-C; each does once a second at most.
_LOOKS = 100


class _Program:
    """The script that this rank runs, whether Ctrl-C was passed on to it, and whether it is over."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.interrupted = False
        self.over = threading.Event()


_program = _Program()


def begin(script: Script, stop: Path, ranks: int) -> None:
    """Prepare for the end of a script. Whatever hook it installs is called for its errors.

    Args:
        stop: the file that asks the ranks to stop, by which Ctrl-C in the launcher's terminal reaches them.
    """
    _program.script = script
    seconds = max(1.0, ranks / _LOOKS)
    threading.Thread(target=_pass_on_interrupt, args=(stop, seconds), name="hpctrain-interrupt", daemon=True).start()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.default_int_handler = _interrupted_handler(signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    except BaseException as of_hook:
        # In Python's own words.
        with contextlib.suppress(OSError, ValueError):
            tell("Error in sys.excepthook:")
            of_hook.__context__ = None
            _print(type(of_hook), of_hook, from_script(of_hook))
            tell("\nOriginal exception was:")
            _print(type(error), error, error.__traceback__)


def _pass_on_interrupt(stop: Path, seconds: float) -> None:
    """Raise KeyboardInterrupt in the main thread once Ctrl-C was pressed, unless the script asks for stops itself."""
    while not _program.over.wait(seconds):
        with contextlib.suppress(OSError):
            if stopping.reason_in(stop) == signal.SIGINT.name and not stopping.this_process.listens():
                # Leaving the run waits for ranks that are where this one left them.
                _program.interrupted = True
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    # Until the handler below runs.
                    Timeout.interrupted = time.monotonic()
                run.leave_no_more()
                # To the main thread itself, which may sleep.
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
                return


def _interrupted_handler(default: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
    """Python's handler of SIGINT, which also notes that the main thread has taken it."""

    @functools.wraps(default)
    def handling(number: int, frame: FrameType | None) -> Any:
        Timeout.interrupted = math.inf
        return default(number, frame)

    return handling


def was_interrupted() -> bool:
    """Whether Ctrl-C was passed on to the script."""
    return _program.interrupted


def end() -> None:
    """Pass on no interrupt from here on."""
    _program.over.set()


def finish() -> None:
    """Do what Python does at the end of a program: wait for threads, and run exit handlers, which close files."""
    if _program.script is None:
        return
    run.leave_no_more()
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
        tell(f"hpctrain: {error}")
    else:
        tell_error(error.with_traceback(trace))
        if explained := explanation(error):
            tell(explained)


def explanation(error: BaseException) -> str:
    """A line on what one of PyTorch's own errors means to a script; empty if it needs no explanation."""
    if parallel := sys.modules.get("hpctrain.worker.adapters.torch.parallel.division"):
        explained: str = parallel.of_divided_tensors(error)
        return explained and f"hpctrain: {explained}"
    return ""


def from_script(error: BaseException) -> TracebackType | None:
    """The part of an error's traceback that begins in the user's script, without hpctrain's frames above it."""
    script = _program.script
    if script and isinstance(error, SyntaxError) and error.filename == str(script.file):
        # A syntax error names its place itself, and nothing of the script was executed.
        return None
    start = error.__traceback__
    while script and start and start.tb_frame.f_code.co_filename != str(script.file):
        start = start.tb_next
    return start or error.__traceback__


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended that is not done: an exit status other than 0, and the error.

    ``resumable``: the work was asked to stop, and did with its state saved.
    """

    exit_code: int
    error: RankError
    resumable: bool = False


def exit_status(stop: SystemExit) -> Ending | None:
    if stop.code is None or stop.code == 0:
        return None
    if isinstance(stop.code, int):
        message = f"exit status {stop.code}"
        resumable = stop.code == stopping.RESUMABLE and stopping.this_process.asked(look=True) is not None
        if stop.code == stopping.RESUMABLE and not resumable:
            message += ", which says that it was stopped, but nobody asked it to stop"
        error = RankError(type="SystemExit", message=message)
        return Ending(exit_code=stop.code & 0xFF or 1, error=error, resumable=resumable)
    with contextlib.suppress(OSError, ValueError):
        tell(stop.code)
    return Ending(exit_code=1, error=RankError(type="SystemExit", message=str(stop.code)))


def describe(error: BaseException) -> Ending:
    kind = type(error).__name__
    if not isinstance(error, HpctrainError):
        message = f"{error}\n{explanation(error)}".rstrip("\n")
        return Ending(exit_code=1, error=RankError(type=kind, message=message))
    refused = error.exit_code != stopping.RESUMABLE and not isinstance(error, TransientError)
    described = RankError(type=kind, message=error.advice, code=error.code, refused=refused)
    return Ending(exit_code=error.exit_code, error=described)


def record_fields(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"status": "done", "trained": _own_training(), **_used()}
    return {
        **_used(),
        "status": "resumable" if ending.resumable else "failed",
        "exit_code": ending.exit_code,
        "error": None if ending.resumable else ending.error,
    }


def _used() -> dict[str, Any]:
    """When this rank ended, and what it and its processes have used."""
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "ended": time.time(),
        "peak_bytes": own.ru_maxrss * 1024,
        "worker_bytes": workers.ru_maxrss * 1024,
        "cpu_seconds": sum(used.ru_utime + used.ru_stime for used in (own, workers)),
    }


def _own_training() -> OwnTraining | None:
    watched = sys.modules.get("hpctrain.worker.adapters.torch.default_group")
    # The script is done. What it has left may be in any state.
    with contextlib.suppress(Exception):
        if watched:
            found: OwnTraining | None = watched.own_training()
            return found
    return None
