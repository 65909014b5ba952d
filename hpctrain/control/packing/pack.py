"""Packs this virtual environment into an archive that is named by its content, and made once."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.cache import cache_folder
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.locks import locked
from hpctrain.common.files.private import make_folder
from hpctrain.common.files.regular import sha256
from hpctrain.common.files.whole import put_in_place, remove_leftovers, require_room, temporary, write_whole
from hpctrain.control.packing.entries import Entry
from hpctrain.control.packing.environment import compiled, environment_entries

# Part of the digest, so that a change of the archive's format changes its name.
_FORMAT = "hpctrain environment 1"
_SUFFIX = ".tar.gz"
# The fastest level; the next ones take twice the time for a tenth less size.
_LEVEL = 1
_DIGITS = 32
_BUFFER_BYTES = 1 << 20
_KEPT_SECONDS = 14 * 24 * 3600
_WAIT_SECONDS = 1800.0
# The coarsest time stamps of a file system that Python runs on.
_TICK_SECONDS = 2.0
_ELSEWHERE = "set XDG_CACHE_HOME to a folder with more room, on a file system that the nodes see"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The archive of an environment, written or not.

    Attributes:
        archive: its path; the file beside it that ends in ``.txt`` has its SHA-256, its bytes, and those of what is
            in it.
        digest: SHA-256 of all paths, modes and contents of the environment.
        entries: of the environment, with the SHA-256 of each file.
        hashes: hashes of files, saved for the next pack.
    """

    archive: Path
    digest: str
    entries: Mapping[str, tuple[Entry, str]]
    hashes: _Hashes

    @property
    def facts(self) -> Path:
        """The file with the archive's SHA-256 and sizes, which is written last."""
        return self.archive.with_name(self.archive.name.removesuffix(_SUFFIX) + ".txt")

    def write(self, say: Callable[[str], None]) -> None:
        """Write the archive, if it is not there yet.

        Args:
            say: gets a line about what takes long.

        Raises:
            HpctrainError: the disk refuses, another process packs for too long, or a file changes meanwhile.
        """
        folder = self.archive.parent
        try:
            make_folder(folder)
        except OSError as error:
            raise disk_error(error, folder, _ELSEWHERE) from error
        with locked(folder, seconds=_WAIT_SECONDS):
            try:
                if not self._is_there():
                    self._write(say)
                self.hashes.save()
                _remove_old(folder)
            except OSError as error:
                written = not error.filename or Path(os.fsdecode(error.filename)).parent == folder
                if not written and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise _unreadable(error) from error
                raise disk_error(error, self.archive, _ELSEWHERE) from error

    def _is_there(self) -> bool:
        try:
            _, size, _ = self.facts.read_text().split()
            if int(size) != self.archive.stat().st_size:
                return False
        except (FileNotFoundError, ValueError):
            return False
        for path in (self.archive, self.facts):
            os.utime(path)
        return True

    def _write(self, say: Callable[[str], None]) -> None:
        remove_leftovers(self.archive.parent)
        total = sum(entry.source.stat().st_size for entry, _ in self.entries.values() if entry.source)
        say(f"packing {sys.prefix}: {len(self.entries)} files, {total / 1e9:.2f} GB …")
        # The archive takes about a third of the files' size.
        require_room(self.archive.parent, total // 2, "written", _ELSEWHERE)
        begin = time.monotonic()
        fresh = temporary(self.archive)
        try:
            with fresh.open("xb") as file:
                out = _Hashed(file)
                with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=_LEVEL, mtime=0, filename="") as zipped:
                    unpacked = self._add_all(zipped)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(fresh, self.archive)
        finally:
            fresh.unlink(missing_ok=True)
        size = self.archive.stat().st_size
        write_whole(self.facts, f"{out.digest.hexdigest()} {size} {unpacked}\n".encode(), elsewhere=_ELSEWHERE)
        say(f"packed in {time.monotonic() - begin:.0f} s: {self.archive}, {size / 1e9:.2f} GB")

    def _add_all(self, zipped: gzip.GzipFile) -> int:
        """Write all files and their compiled modules; returns the bytes that they take when they are unpacked."""
        with tarfile.open(fileobj=zipped, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_BUFFER_BYTES) as tar:
            for name, (entry, digest) in sorted(self.entries.items()):
                _add(tar, name, entry, digest)
                if name.endswith(".py") and entry.source and (module := compiled(entry.source)):
                    folder, _, file = name.rpartition("/")
                    _add(tar, f"{folder}/__pycache__/{file[:-3]}.{sys.implementation.cache_tag}.pyc", module)
            return tar.offset


def find_pack() -> Pack:
    """The pack of this environment as it is now; reads what has changed since the last one, and writes nothing.

    Raises:
        HpctrainError: this Python is in no virtual environment, or one whose parts cannot all be found.
    """
    folder = cache_folder("environments").absolute()
    hashes = _Hashes(folder)
    digest = hashlib.sha256(_FORMAT.encode())
    found = {}
    try:
        for name, entry in sorted(environment_entries().items()):
            own = hashes.of(entry)
            found[name] = (entry, own)
            kind = "link" if entry.link is not None else "program" if entry.executable else "file"
            digest.update(f"\n{name!a} {kind} {own}".encode())
    except OSError as error:
        raise _unreadable(error) from error
    key = digest.hexdigest()[:_DIGITS]
    return Pack(archive=folder / f"{key}{_SUFFIX}", digest=key, entries=found, hashes=hashes)


def _unreadable(error: OSError) -> HpctrainError:
    return HpctrainError(
        "HT-file-unreadable",
        "--pack: cannot read {path}: {reason}",
        "make it readable, or wait for what changes the environment to end, and submit again",
        exit_code=1,
        path=error.filename,
        reason=error.strerror,
    )


class _Hashes:
    """SHA-256 of files, remembered for those whose sizes and times stay the same.

    A file that was changed a moment ago is not remembered: it may change again without another time stamp.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"hashes-{hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:_DIGITS]}.json"
        self._known: dict[str, list[int | str]] = {}
        self._seen: dict[str, list[int | str]] = {}
        # Without a readable file all hashes are computed again.
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            found = json.loads(self._path.read_text())
            self._known = {path: known for path, known in found.items() if isinstance(known, list)}

    def of(self, entry: Entry) -> str:
        if entry.source is None:
            text = entry.content if entry.content is not None else os.fsencode(entry.link or "")
            return hashlib.sha256(text).hexdigest()
        now, path, state = time.time(), str(entry.source), entry.source.stat()
        signs: list[int | str] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        known = self._known.get(path, [])
        own = str(known[-1]) if known[:-1] == signs else sha256(entry.source)[0]
        if abs(now - state.st_ctime) > _TICK_SECONDS:
            self._seen[path] = [*signs, own]
        return own

    def save(self) -> None:
        if self._seen != self._known:
            write_whole(self._path, json.dumps(self._seen).encode(), elsewhere=_ELSEWHERE)


class _Hashed(io.RawIOBase):
    """Writes to a file, or reads from it, and hashes what goes through."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, name: str, entry: Entry, digest: str | None = None) -> None:
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if entry.executable else 0o644
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        tar.addfile(info)
    elif entry.source is None:
        content = entry.content or b""
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    else:
        with entry.source.open("rb") as file:
            state = os.fstat(file.fileno())
            # Compiled modules are valid for the time of their source.
            info.size, info.mtime = state.st_size, int(state.st_mtime)
            through = _Hashed(file)
            tar.addfile(info, through)
        if digest is not None and through.digest.hexdigest() != digest:
            raise HpctrainError(
                "HT-pack-file-changed",
                "{path} was changed while it was packed",
                "submit again",
                exit_code=1,
                path=entry.source,
            )


def _remove_old(folder: Path) -> None:
    """Remove archives that no job has used for a while."""
    for path in folder.glob(f"*{_SUFFIX}"):
        if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
            path.unlink()
            path.with_name(path.name.removesuffix(_SUFFIX) + ".txt").unlink(missing_ok=True)
