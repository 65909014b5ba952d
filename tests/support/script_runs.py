"""Run directories of a script, and what happened in them."""

from __future__ import annotations

import time
from pathlib import Path

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventWriter
from hpctrain.common.run.plan import Plan, Script


def script_run(path: Path, ranks: int = 2) -> RunDirectory:
    made = RunDirectory(path)
    made.create(Plan(script=Script(path=Path("train.py")), ranks=ranks, hosts=(), threads_per_rank=1))
    return made


def happened(directory: RunDirectory, *events: Event) -> None:
    """Each with a time of its own: they are made before."""
    with EventWriter(directory.events) as writer:
        for event in events:
            writer.emit(event.model_copy(update={"time": time.time()}))
