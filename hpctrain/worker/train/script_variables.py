"""Tells other libraries of a script what follows from its run, in variables that the user has not set.

Each rank sets them itself: some differ by rank and host, and no launcher has to pass them on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import stat
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder, read_regular
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import run_id
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.after_import import change_after_import
from hpctrain.worker.train.hub import ask_for_the_hub

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# How PyTorch calls the beginning of a dump's path, the second until 2.8.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_MLFLOW_RUN = "MLFLOW_RUN_ID"
_IDENTITY = re.compile(rb"[\w-]{1,100}", re.ASCII)
_MOST_BYTES = 200
# With any of these a call says itself which run it begins.
_CHOOSES = ("id", "fork_from", "resume_from")


def keep_dumps(directory: RunDirectory) -> None:
    """Have PyTorch write what it records of NCCL's collectives into the run, where its watchdog ends one that hangs.

    It records the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` says otherwise.
    """
    if not any(name in os.environ for name in _DUMPS):
        os.environ |= dict.fromkeys(_DUMPS, str(directory.flight_recorder.absolute()))


def set_variables(directory: RunDirectory, rank: int) -> None:
    """Set the variables of a rank's process before its script begins."""
    folder = None
    try:
        folder = code_folder()
        os.environ.setdefault(CACHE, str(folder))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    except HpctrainError as error:
        tell(f"hpctrain: warning: {error}")
    keep_tracked_runs(directory, rank)
    ask_for_the_hub(directory, folder)


def code_folder() -> Path:
    """The user's own folder for compiled code in the node's temporary storage, where anybody can make folders.

    Raises:
        HpctrainError: it cannot be made, is another user's, or can be written by others, whose code ranks would run.
    """
    elsewhere = f"{CACHE}=DIR chooses another"
    # Some sites set SLURM_TMPDIR in jobs, and not TMPDIR.
    folder = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"hpctrain-compiled-{os.getuid()}"
    try:
        make_folder(folder)
        status = folder.lstat()
    except OSError as error:
        raise disk_error(error, folder, elsewhere) from error
    foreign = stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid()
    if foreign or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HpctrainError(
            "HT-cache-not-safe",
            "{folder}, whose files ranks run, is another user's, or others can write into it",
            f"rm -r {folder}, or {elsewhere}",
            folder=folder,
        )
    return folder.absolute()


def keep_tracked_runs(directory: RunDirectory, rank: int) -> None:
    """Have what a rank's script begins by ``wandb.init`` or ``mlflow.start_run`` go on in the next attempt.

    That holds for a script that begins one run and leaves its choice to W&B or MLflow. Most scripts track on rank 0;
    others have a run of W&B for each rank.
    """
    # The script may change its working directory.
    folder = directory.path.absolute()
    mine = f"-{rank}" if rank else ""
    os.environ.setdefault("WANDB_DIR", str(folder))
    if "WANDB_RUN_ID" not in os.environ:
        # Ranks that are started by hand may come before the run's first event.
        with contextlib.suppress(OSError):
            # The other half of it is the identity of the run that hpctrain itself tracks.
            first = run_id(directory.events)[16:] + mine
            change_after_import({"wandb": functools.partial(_keep_wandb, _Kept(folder / f"wandb-run{mine}", first))})
    if rank == 0 and _MLFLOW_RUN not in os.environ:
        kept = _Kept(folder / directory.mlflow_run.name)
        if kept.identity:
            os.environ[_MLFLOW_RUN] = kept.identity
        change_after_import({"mlflow.tracking.fluent": functools.partial(_keep_mlflow, kept)})


class _Kept:
    """The run that the first call of a script begins. A file has its identity, for the attempts that follow.

    The file is empty where a script begins several runs: nobody can say which of them an attempt goes on with.

    Attributes:
        identity: of the run to go on with, or to begin; None for a new one of the tracker's choice.
    """

    def __init__(self, file: Path, first: str | None = None) -> None:
        self.identity, self._file, self._begun = first, file, ""
        if os.path.lexists(file):
            content = b""
            with contextlib.suppress(OSError):
                content = read_regular(file, _MOST_BYTES, links=False)
            self.identity = content.decode() if _IDENTITY.fullmatch(content) else None
            self._several = self.identity is None
        else:
            self._several = False

    def note(self, identity: str) -> None:
        """Write down the run that a call has begun."""
        if self._several or identity == self._begun:
            return
        self._several, self._begun = bool(self._begun), identity
        with contextlib.suppress(HpctrainError, OSError):
            write_whole(self._file, b"" if self._several else identity.encode(), private=True)


def _keep_wandb(kept: _Kept, wandb: ModuleType) -> None:
    init, begun = wandb.init, False

    @functools.wraps(init)
    def started(*arguments: Any, **settings: Any) -> Any:
        nonlocal begun
        given = inspect.signature(init).bind_partial(*arguments, **settings).arguments
        if any(given.get(name) for name in _CHOOSES) or given.get("resume") in ("must", "never"):
            return init(*arguments, **settings)
        if kept.identity and not begun:
            settings |= {"id": kept.identity, "resume": "allow"}
        begun = True
        run = init(*arguments, **settings)
        kept.note(run.id)
        return run

    wandb.init = started  # type: ignore[attr-defined]


def _keep_mlflow(kept: _Kept, fluent: ModuleType) -> None:
    start_run = fluent.start_run

    @functools.wraps(start_run)
    def started(*arguments: Any, **settings: Any) -> Any:
        goes_on = kept.identity is not None and os.environ.get(_MLFLOW_RUN) == kept.identity
        try:
            run = start_run(*arguments, **settings)
        except fluent.MlflowException as error:
            if not goes_on:
                raise
            # It is of another experiment or store, or was deleted.
            os.environ.pop(_MLFLOW_RUN, None)
            tell(f"hpctrain: MLflow does not go on with run {kept.identity}, so another one begins: {error}")
            run = start_run(*arguments, **settings)
        if not settings.get("nested"):
            kept.note(run.info.run_id)
        return run

    fluent.start_run = started  # type: ignore[attr-defined]
