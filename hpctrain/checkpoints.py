"""Checkpoints: the state of a training right after a step, each whole on disk or not there at all.

::

    RUN_DIR/checkpoints/step-00000123/state.safetensors    parameters, buffers, optimizer and random state
    RUN_DIR/checkpoints/step-00000123/state.json           how far the training was

Rank 0 writes them, every rank reads them, and the launcher looks which is the newest whole one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.errors import HpctrainError
from hpctrain.events import disk_error
from hpctrain.rundir import read_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME = re.compile(r"step-(\d{8,})")


class Progress(BaseModel):
    """``state.json``: how far a training was.

    Attributes:
        iteration: steps that were done.
        epoch: the one in work, from 1. Its evaluation comes after the checkpoint of its last step.
        losses, sizes: of the steps of that epoch: the mean loss, and how many samples it is of. The sum of the sizes is
            where the epoch is, although ranks that died may have made later batches smaller.
        epoch_seconds, seconds: spent on the steps of that epoch, and on the whole run.
        ranks: how many there were.
        samples: which ones are trained on (see hpctrain.data.source.Source.fingerprint).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    iteration: int
    epoch: int
    losses: tuple[float, ...]
    sizes: tuple[int, ...]
    epoch_seconds: float
    seconds: float
    ranks: int
    samples: str


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return folder / f"step-{iteration:08}"


def write_checkpoint(folder: Path, progress: Progress, state: Mapping[str, NDArray[Any]]) -> Path:
    """Write a checkpoint, and keep the one before it.

    Raises:
        HpctrainError: the disk is full, or refuses.
    """
    from safetensors.numpy import save

    path = checkpoint_path(folder, progress.iteration)
    fresh = folder / f".{path.name}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _write(fresh / "state.safetensors", save(dict(state)))
        _write(fresh / "state.json", progress.model_dump_json(indent=2).encode())
        _synchronise(fresh)
        # One of that name is left over from steps that were lost, and was passed over as damaged.
        if path.exists():
            shutil.rmtree(path)
        fresh.replace(path)
        _synchronise(folder)
        _remove_others(folder, progress.iteration)
    except OSError as error:
        raise disk_error(error, path) from error
    return path


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, NDArray[Any]]]:
    """What :func:`write_checkpoint` wrote.

    Raises:
        HpctrainError: it is not there, or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = path / "state.safetensors"
    try:
        return read_model(path / "state.json", Progress), load_file(file)
    except (OSError, SafetensorError) as error:
        raise HpctrainError(
            f"cannot read {file}: {error}", "--resume takes the checkpoint before", exit_code=1
        ) from error


def newest_checkpoint(folder: Path) -> tuple[int, tuple[str, ...]]:
    """The iteration of the newest whole checkpoint, 0 where there is none, and what is wrong with each newer one."""
    faults: list[str] = []
    for iteration in sorted(_iterations(folder), reverse=True):
        fault = _fault(checkpoint_path(folder, iteration), iteration)
        if fault is None:
            return iteration, tuple(faults)
        faults.append(fault)
    return 0, tuple(faults)


def _fault(path: Path, iteration: int) -> str | None:
    """What is wrong with a checkpoint, as far as its sizes and its text tell."""
    from safetensors import SafetensorError, safe_open

    try:
        # Opening compares the file's size with what its header announces.
        with safe_open(path / "state.safetensors", framework="np"):
            progress = read_model(path / "state.json", Progress)
    except (OSError, SafetensorError, HpctrainError) as error:
        return f"{path}: {_of_another_version(error.__cause__) or error}"
    return None if progress.iteration == iteration else f"{path}: state.json is of step {progress.iteration}"


def _of_another_version(error: BaseException | None) -> str | None:
    """What to say of a whole file whose keys are not those of :class:`Progress`; None for any other fault."""
    if not isinstance(error, ValidationError):
        return None
    faults = error.errors()
    if any(fault["type"] not in ("missing", "extra_forbidden") for fault in faults):
        return None
    what = ", ".join(
        f"{'lacks' if fault['type'] == 'missing' else 'has'} {'.'.join(map(str, fault['loc']))!r}" for fault in faults
    )
    return f"written by another version of hpctrain, which can go on with it: state.json {what}"


def _iterations(folder: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return [int(match[1]) for match in found if match]


def _remove_others(folder: Path, iteration: int) -> None:
    """Keep the newest and the one before: later ones are of steps that were lost, hidden ones of an earlier crash."""
    before = max((other for other in _iterations(folder) if other < iteration), default=None)
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name.removeprefix("."))
        if match and (path.name.startswith(".") or int(match[1]) not in (iteration, before)):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(folder: Path) -> None:
    """Let the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
