"""Copies the code of a script that is submitted, so that what was submitted is what its jobs run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RUNS, RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.stderr import tell

_MOST_BYTES = 50 * 10**6
_MOST_FILES = 20_000
# Git looks at every file that it does not ignore, perhaps on a file server.
_GIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Code:
    """The code that a script belongs to.

    Attributes:
        folder: the top of the script's Git repository; without one the script's folder.
        files: to be copied, from that folder; None where they are too many or too large.
        commit: of Git; None without a repository or a first commit.
        diff: what the tracked files differ in from that commit.
    """

    folder: Path
    files: tuple[Path, ...] | None
    commit: str | None = None
    diff: bytes = b""

    @classmethod
    def of(cls, script: Path, *, copied: bool) -> Code:
        """Look at the code of a script.

        Args:
            copied: whether its files are to be copied.
        """
        top = _git(script.parent, "rev-parse", "--show-toplevel").removesuffix("\n")
        # An automounter may give a folder several names.
        top = top if script.is_relative_to(top) else ""
        folder = Path(top) if top else script.parent
        files = None
        if copied:
            files = _within_bounds(folder, _tracked_or_new(folder, script) if top else _beside(folder))
        commit = _git(folder, "rev-parse", "--verify", "HEAD").strip() if top else ""
        diff = _git(folder, "diff", "HEAD") if commit else ""
        return cls(folder=folder, files=files, commit=commit or None, diff=diff.encode(errors="replace"))


def with_code(plan: Plan, directory: RunDirectory, code: Code) -> Plan:
    """The plan of a run whose script is the copy in its directory; the same where it is not copied."""
    assert plan.script is not None
    script = plan.script.model_copy(update={"commit": code.commit})
    start = plan.start
    if code.files is not None:
        script = script.model_copy(update={"path": directory.code / script.path.relative_to(code.folder)})
        # What is not copied is linked.
        start = start.mounting(code.folder)
    return plan.model_copy(update={"script": script, "start": start})


def write_code(code: Code, script: Path, directory: RunDirectory) -> None:
    """Copy the files, and link what lies beside those that the script may name by its own place: data, ignored folders.

    Raises:
        HpctrainError: they cannot be read or written.
    """
    try:
        if code.diff:
            write_whole(directory.code_diff, code.diff, private=True)
        if code.files is None:
            return
        make_folder(directory.code)
        for file in code.files:
            source, copy = code.folder / file, directory.code / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                # A link to a folder, or a repository within this one.
                copy.symlink_to(source.resolve())
            elif source.is_file() and os.access(source, os.R_OK):
                shutil.copy2(source, copy)
        for level in script.relative_to(code.folder).parents:
            _link_others(code.folder / level, directory.code / level)
    except OSError as error:
        raise disk_error(error, directory.code) from error


def _link_others(folder: Path, copy: Path) -> None:
    for entry in folder.iterdir():
        if not os.path.lexists(copy / entry.name) and not _left_out(entry):
            (copy / entry.name).symlink_to(entry)


def _within_bounds(folder: Path, files: Iterable[Path]) -> tuple[Path, ...] | None:
    """The files; None, with a warning, where they are more than a copy may have."""
    kept: list[Path] = []
    size = 0
    for file in files:
        kept.append(file)
        source = folder / file
        size += source.stat().st_size if source.is_file() else 0
        if size > _MOST_BYTES or len(kept) > _MOST_FILES:
            tell(
                f"hpctrain: warning: {folder} has more than {_MOST_BYTES // 10**6} MB or {_MOST_FILES:,} files that "
                "Git does not ignore, so its code is not copied: the job runs what is there when it starts. --no-copy "
                "asks for that"
            )
            return None
    return tuple(kept)


def _tracked_or_new(folder: Path, script: Path) -> Iterator[Path]:
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    # Thousands of files are in few folders.
    left_out = cache(_left_out)
    # The script may be one that Git ignores.
    for file in dict.fromkeys([script.relative_to(folder), *map(Path, filter(None, listed))]):
        if not any(left_out(folder / above) for above in file.parents[:-1]):
            yield file


def _beside(folder: Path) -> Iterator[Path]:
    """The files of a folder that is in no repository, without hidden ones."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and not _left_out(Path(place, name))]
        for name in (*files, *(name for name in folders if Path(place, name).is_symlink())):
            if not name.startswith("."):
                yield Path(place, name).relative_to(folder)


def _left_out(folder: Path) -> bool:
    """Whether a folder is neither code nor data: runs, virtual environments, what Python compiles."""
    # Unlike pathlib's exists(), this says of a folder that may not be entered that it has none.
    made = any(os.access(folder / name, os.F_OK) for name in ("plan.json", "pyvenv.cfg"))
    return made or folder.name in (str(RUNS), "__pycache__")


def _git(folder: Path, *command: str) -> str:
    return program_output("git", "-C", str(folder), *command, seconds=_GIT_SECONDS)
