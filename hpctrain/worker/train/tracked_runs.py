"""Has a script's own run of W&B or MLflow go on in the later attempts of the script's run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import run_id
from hpctrain.common.stderr import tell
from hpctrain.worker.comm.after_import import change_after_import

_MLFLOW_RUN = "MLFLOW_RUN_ID"
_IDENTITY = re.compile(rb"[\w-]{1,100}", re.ASCII)
_MOST_BYTES = 200
# With any of these a call says itself which run it begins.
_CHOOSES = ("id", "fork_from", "resume_from")


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
