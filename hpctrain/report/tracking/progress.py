"""How many of a run's events a tracker has."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.locks import lock
from hpctrain.common.files.private import make_folder, private
from hpctrain.common.run.directory import RunDirectory, read_model, write_json

# After a launcher was killed, its sender still sends what there is, and holds the lock meanwhile.
_LOCK_SECONDS = 30.0


class TrackerProgress(BaseModel):
    """``tracking/NAME.json``.

    Attributes:
        id: identifies the run at every server.
        run: the server's own name for it; None until that is known.
        sent: the number of events that the server has.
        time: the time of the last of them; None for none.
    """

    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    run: str | None = None
    sent: int = Field(0, ge=0)
    time: float | None = None


def read_progress(directory: RunDirectory, name: str) -> TrackerProgress:
    """The progress that was written last, or a new one.

    Raises:
        HpctrainError: the file cannot be read or written.
    """
    if _path(directory, name).exists():
        return read_model(_path(directory, name), TrackerProgress)
    progress = TrackerProgress()
    write_progress(directory, name, progress)
    return progress


def write_progress(directory: RunDirectory, name: str, progress: TrackerProgress) -> None:
    """Write or replace the file.

    Raises:
        HpctrainError: the disk is full.
    """
    write_json(_path(directory, name), progress.model_dump())


@contextlib.contextmanager
def only_sender(directory: RunDirectory, name: str) -> Iterator[None]:
    """Hold the lock of the only process that sends this run to that tracker.

    Raises:
        HpctrainError: another process still holds it, the run was moved, or the folder cannot be made.
    """
    path = directory.tracking / f"{name}.lock"
    if not directory.plan.exists():
        raise HpctrainError(
            "HT-run-directory-gone",
            "{path} has no plan.json",
            "it was moved or replaced, or is not the directory of a run",
            exit_code=1,
            path=directory.path,
        )
    try:
        make_folder(directory.tracking, within=directory.path)
        descriptor = private(str(path), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        if not lock(descriptor, path, _LOCK_SECONDS, "remove that folder"):
            raise HpctrainError(
                "HT-run-already-sent",
                "another process sends {path} there",
                "it sends all of it",
                exit_code=1,
                path=directory.path,
            )
        yield
    finally:
        os.close(descriptor)


def _path(directory: RunDirectory, name: str) -> Path:
    return directory.tracking / f"{name}.json"
