"""Sets variables that other libraries read in a rank, where the user has not set them: they follow from its run.

Each rank does so itself: some differ by rank and host, and no launcher has to pass them on.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.stderr import tell
from hpctrain.worker.train.tracked_runs import keep_tracked_runs

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# How PyTorch calls the beginning of a dump's path, the second until 2.8.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def keep_dumps(directory: RunDirectory) -> None:
    """Have PyTorch write what it records of NCCL's collectives into the run, where its watchdog ends one that hangs.

    It records the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` says otherwise.
    """
    if not any(name in os.environ for name in _DUMPS):
        os.environ |= dict.fromkeys(_DUMPS, str(directory.flight_recorder.absolute()))


def set_variables(directory: RunDirectory, rank: int) -> None:
    """Set the variables of a rank's process before its script begins."""
    try:
        folder = code_folder()
    except HpctrainError as error:
        tell(f"hpctrain: warning: {error}")
    else:
        os.environ.setdefault(CACHE, str(folder))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    keep_tracked_runs(directory, rank)


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
