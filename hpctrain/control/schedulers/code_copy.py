"""Copies the code of a script that is submitted, so that what was submitted is what its jobs run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder, read_regular
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RUNS, RunDirectory
from hpctrain.common.run.plan import Copied, Plan
from hpctrain.common.stderr import tell

_MOST_BYTES = 50 * 10**6
_MOST_FILES = 20_000
# Git looks at every file that it does not ignore, perhaps on a file server.
_GIT_SECONDS = 60.0


class _NotCopiedError(Exception):
    """Why code cannot be copied, in words."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The code that a script belongs to.

    Attributes:
        folder: the top of the script's Git repository; without one the script's folder.
        files: to be copied, from that folder; None where they cannot be listed, are too many or too large.
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
        # An automounter or a link may give a folder several names.
        above = next((above for above in script.parents if top and above.samefile(top)), None)
        folder, files = above or script.parent, None
        try:
            if copied:
                files = _within_bounds(folder, _of_repository(folder, script) if above else _beside(folder))
                if not above and b"sys.path" in read_regular(script, _MOST_BYTES):
                    tell(
                        f"hpctrain: warning: {script.name} changes sys.path and is in no Git repository, so only "
                        f"{folder} is copied: modules from elsewhere are those that are there when the job starts"
                    )
        except _NotCopiedError as reason:
            tell(
                f"hpctrain: warning: {reason}, so the code of {script.name} is not copied: the job runs what is there "
                "when it starts. --no-copy asks for that"
            )
        commit = _git(folder, "rev-parse", "--verify", "HEAD").strip() if above else ""
        diff = _git(folder, "diff", "HEAD") if commit else ""
        return cls(folder=folder, files=files, commit=commit or None, diff=diff.encode(errors="replace"))


def with_code(plan: Plan, directory: RunDirectory, code: Code) -> Plan:
    """The plan of a run whose script is the copy in its directory; the same where it is not copied."""
    assert plan.script is not None
    copied = Copied(source=code.folder, target=_target(code, directory)) if code.files is not None else None
    script = plan.script.model_copy(update={"commit": code.commit, "copied": copied})
    # What is not copied is linked.
    start = plan.start.mounting(code.folder) if copied else plan.start
    return plan.model_copy(update={"script": script, "start": start})


def _target(code: Code, directory: RunDirectory) -> Path:
    # One level below, so that a path from the script to what lies beside its folder leads to links.
    return directory.code / code.folder.name


def write_code(code: Code, directory: RunDirectory) -> None:
    """Copy the files, and link whatever else is in their folders and beside the top one: data, what Git ignores.

    Raises:
        HpctrainError: they cannot be read or written.
    """
    try:
        if code.diff:
            write_whole(directory.code_diff, code.diff, private=True)
        if code.files is None:
            return
        make_folder(directory.code, exist_ok=False)
        copied = Copied(source=code.folder.resolve(), target=_target(code, directory))
        sources = {file: code.folder / file for file in code.files}
        files = [file for file, source in sources.items() if source.is_file() and os.access(source, os.R_OK)]
        folders = dict.fromkeys(above for file in files for above in reversed(file.parents))
        for folder in folders:
            (copied.target / folder).mkdir(exist_ok=True)
        for file in files:
            shutil.copy2(sources[file], copied.target / file)
        for folder in folders:
            _link_others(code.folder / folder, copied.target / folder, copied, directory)
        _link_others(code.folder.parent, directory.code, copied, directory)
    except OSError as error:
        raise disk_error(error, directory.code) from error


def _link_others(folder: Path, copy: Path, copied: Copied, directory: RunDirectory) -> None:
    for entry in _entries(folder):
        # Unlike pathlib's resolve(), this takes a link to itself.
        link, real = copy / entry.name, Path(os.path.realpath(entry))
        if not (os.path.lexists(link) or _left_out(entry) or real == directory.path.resolve()):
            # What links to a copied folder leads to its copy.
            inner = copied.of(real)
            link.symlink_to(inner if entry.is_symlink() and inner != real and inner.exists() else entry)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; empty for one that may not be listed, even if it may be entered."""
    return list(folder.iterdir()) if folder.is_dir() and os.access(folder, os.R_OK) else []


def _within_bounds(folder: Path, files: Iterator[Path]) -> tuple[Path, ...]:
    kept: dict[Path, None] = {}
    size = 0
    for file in files:
        source = folder / file
        size += source.stat().st_size if file not in kept and source.is_file() else 0
        kept[file] = None
        if size > _MOST_BYTES or len(kept) > _MOST_FILES:
            raise _NotCopiedError(f"{folder} has more than {_MOST_BYTES // 10**6} MB or {_MOST_FILES:,} files of code")
    for above in {(folder / file).parent for file in kept}:
        # Those that are not copied would be as many links.
        if len(_entries(above)) > _MOST_FILES:
            raise _NotCopiedError(f"{above} has code and more than {_MOST_FILES:,} files")
    return tuple(kept)


def _of_repository(top: Path, script: Path) -> Iterator[Path]:
    """The files of a script's repository; with those beside the script where Git ignores its whole folder."""
    # Git lists nothing below a link to a folder.
    script = Copied(source=top.resolve(), target=top).of(script.parent.resolve()) / script.name
    yield script.relative_to(top)
    # Thousands of files are in few folders. Those above the script, with the top, stay whatever they are.
    left_out = cache(lambda folder: folder not in script.parents and _left_out(folder))
    beside = False
    for file in _listed(top):
        path = top / file
        # A folder of data may have nothing that Git knows but .gitkeep, and is then linked.
        if not file.name.startswith(".git") and not any(map(left_out, path.parents)):
            beside = beside or path.is_relative_to(script.parent)
            yield file
    if not beside:
        yield from (script.parent.relative_to(top) / file for file in _beside(script.parent))


def _listed(repository: Path) -> Iterator[Path]:
    """What Git tracks or would track, with the files of repositories within."""
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if not listed:
        raise _NotCopiedError(f"git ls-files did not answer, failed, or listed no file of {repository}")
    for name in filter(None, listed.split("\0")):
        path = repository / name
        if not path.is_dir() or path.is_symlink():
            yield Path(name)
        elif (path / ".git").exists():
            yield from (Path(name) / file for file in _listed(path))


def _beside(folder: Path) -> Iterator[Path]:
    """The files of a folder that is in no repository, without hidden ones."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and not _left_out(Path(place, name))]
        for name in files:
            if not name.startswith("."):
                yield Path(place, name).relative_to(folder)


def _left_out(path: Path) -> bool:
    """Whether a path is neither code nor data: runs, virtual environments, what Git and Python keep for themselves."""
    if path.name in (str(RUNS), "__pycache__", ".git"):
        return True
    run = RunDirectory(path)
    # Unlike pathlib's exists(), this says of a folder that may not be entered that it has none.
    begun = any(os.access(made, os.F_OK) for made in (run.ranks, run.events, run.submission))
    return (begun and os.access(run.plan, os.F_OK)) or os.access(path / "pyvenv.cfg", os.F_OK)


def _git(folder: Path, *command: str) -> str:
    return program_output("git", "-C", str(folder), *command, seconds=_GIT_SECONDS)
