"""How a rank ended: what its exception says to the launcher."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.run import stopping
from hpctrain.common.run.records import OwnTraining, RankError
from hpctrain.common.stderr import tell
from hpctrain.worker.train.program_end import explanation


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended that is not done: an exit status other than 0, and the error as text.

    ``resumable``: the work was asked to stop, and did with its state saved. ``refused``: hpctrain says what is wrong,
    and another attempt would not help.
    """

    exit_code: int
    kind: str
    message: str
    code: str = ""
    resumable: bool = False
    refused: bool = False


def exit_status(stop: SystemExit) -> Ending | None:
    if stop.code is None or stop.code == 0:
        return None
    if isinstance(stop.code, int):
        message = f"exit status {stop.code}"
        resumable = stop.code == stopping.RESUMABLE and stopping.this_process.asked(look=True) is not None
        if stop.code == stopping.RESUMABLE and not resumable:
            message += ", which says that it was stopped, but nobody asked it to stop"
        return Ending(exit_code=stop.code & 0xFF or 1, kind="SystemExit", message=message, resumable=resumable)
    with contextlib.suppress(OSError, ValueError):
        tell(stop.code)
    return Ending(exit_code=1, kind="SystemExit", message=str(stop.code))


def describe(error: BaseException) -> Ending:
    kind = type(error).__name__
    if not isinstance(error, HpctrainError):
        return Ending(exit_code=1, kind=kind, message=f"{error}\n{explanation(error)}".rstrip("\n"))
    refused = error.exit_code != stopping.RESUMABLE and not isinstance(error, TransientError)
    return Ending(exit_code=error.exit_code, kind=kind, message=error.advice, code=error.code, refused=refused)


def record_fields(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"status": "done", "ended": time.time(), "trained": _own_training()}
    return {
        "status": "resumable" if ending.resumable else "failed",
        "ended": time.time(),
        "exit_code": ending.exit_code,
        "error": None
        if ending.resumable
        else RankError(type=ending.kind, message=ending.message, code=ending.code, refused=ending.refused),
    }


def _own_training() -> OwnTraining | None:
    watched = sys.modules.get("hpctrain.worker.adapters.torch.default_group")
    # The script is done. What it has left may be in any state.
    with contextlib.suppress(Exception):
        if watched:
            found: OwnTraining | None = watched.own_training()
            return found
    return None
