"""Objects below a URL of object storage, fetched whole through fsspec.

Attempts and their limits are decided here and nowhere else: the retries of s3fs and of botocore are switched off, as
they would multiply.
"""

from __future__ import annotations

import errno
import os
import re
import time
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeGuard

from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.disk import disk_error, temporary_folder
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.regular import sha256 as hash_of
from hpctrain.common.files.whole import put_in_place, temporary
from hpctrain.common.secrets import has_credentials
from hpctrain.common.settings import CACHE, OBJECT_TIMEOUT, TIMEOUT

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_S3 = ("s3", "s3a")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ATTEMPTS = 8
# Pauses are random, below a bound that doubles up to a maximum, so that many nodes do not retry at the same time.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
# The share of the timeout for all attempts: a process that waits for another one's attempts needs its own third.
_SHARE_OF_TIMEOUT = 1 / 3
# An object that arrives more slowly is tried again: a server that sends a byte now and then never falls silent.
_LEAST_BYTES_PER_SECOND = 1 << 20
# The last attempt gets so many seconds too, or its error would be that it had none.
_LEAST_SECONDS = 1.0
_BLOCK_BYTES = 1 << 20
# These say that an object is missing or forbidden, so another attempt would get the same answer.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class _DamagedError(Exception):
    """The received bytes differ from what the manifest says."""


class _TooLongError(_DamagedError):
    """More comes, or is said to come, than there may be; it would at another attempt too."""


def is_url(place: str) -> bool:
    """Whether a place of shards is one of fsspec's, as ``s3://bucket/prefix``, rather than a folder."""
    return _URL.match(place) is not None


def url_fault(url: str) -> str | None:
    """What is wrong with a URL of shards, without the URL; None where nothing is. Plans and messages have such URLs."""
    if has_credentials(url) or {"?", "#"} & {*url}:
        return (
            "a URL of shards has no user, password or query: credentials come from the environment or a profile, such "
            "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    return None


def all_attempts_seconds() -> float:
    """How long all attempts at one object may take."""
    return TIMEOUT.read() * _SHARE_OF_TIMEOUT


class Objects:
    """The objects below a URL. Connects on first use; for several threads at a time.

    Args:
        url: the prefix that is before their names.

    Raises:
        HpctrainError: it has credentials or a query.
    """

    def __init__(self, url: str) -> None:
        fault = url_fault(url)
        if fault:
            raise HpctrainError("HT-url-with-credentials", "{problem}", "for example s3://BUCKET/PREFIX", problem=fault)
        self.url = url.rstrip("/")

    def at(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}"

    def read(self, name: str, limit: int) -> bytes:
        """An object of at most ``limit`` bytes that nothing else is known of.

        Raises:
            HpctrainError: it cannot be fetched, or it is longer than ``limit``.
        """
        with temporary_folder("hpctrain-object-", None, "TMPDIR=DIR chooses another folder") as folder:
            self.fetch(name, Path(folder) / "object", limit=limit)
            return read_regular(Path(folder) / "object", limit)

    def fetch(self, name: str, to: Path, *, limit: int, sha256: str | None = None, size: int | None = None) -> None:
        """Fetch a whole object to a file, which appears when it is complete and as it was written.

        Args:
            name: the object's name below the URL.
            to: the file, in a folder that is there.
            limit: bytes that it may have; no more are fetched, and none where the server says that it has more.
            sha256: the object's hash, if it is known.
            size: the object's size in bytes, if it is known.

        Raises:
            HpctrainError: it cannot be fetched: named, with the number of attempts and what was wrong at the last one;
                the disk is full; or the URL is none of fsspec's.
        """
        from tenacity import (
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            stop_before_delay,
            wait_random_exponential,
        )

        filesystem = self._filesystem
        most_seconds = all_attempts_seconds()
        begun = time.monotonic()
        fresh = temporary(to)

        def once() -> None:
            seconds = min(
                OBJECT_TIMEOUT.read() + (size or 0) / _LEAST_BYTES_PER_SECOND,
                begun + most_seconds - time.monotonic(),
            )
            _get(filesystem, self.at(name), fresh, limit, max(seconds, _LEAST_SECONDS))
            _compare(fresh, sha256, size)

        retrying = Retrying(
            stop=stop_after_attempt(_ATTEMPTS) | stop_before_delay(most_seconds),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS),
            retry=retry_if_exception(
                lambda error: not isinstance(error, (*_FINAL, _TooLongError)) and not _is_local(error, fresh)
            ),
            reraise=True,
        )
        try:
            retrying(_connect, filesystem, most_seconds)
            begun = time.monotonic()
            retrying(once)
            _make_durable(fresh, to)
        except Exception as error:
            if _is_local(error, fresh):
                raise disk_error(error, to, f"choose another folder with {CACHE.name}") from error
            attempts = retrying.statistics.get("attempt_number", 1)
            waited = time.monotonic() - begun
            raise HpctrainError(
                "HT-object-not-fetched",
                "{object}: {problem}; gave up in attempt {attempts} of at most {most}, after {waited:.1f} s",
                f"hpctrain data stage {quote(self.url)} DIR compares all objects with the manifest; endpoint and "
                "credentials come from the environment (AWS_ENDPOINT_URL, AWS_PROFILE and the like)",
                exit_code=1,
                object=self.at(name),
                problem=_words(error),
                attempts=attempts,
                most=_ATTEMPTS,
                waited=waited,
            ) from error
        finally:
            fresh.unlink(missing_ok=True)

    @cached_property
    def _filesystem(self) -> AbstractFileSystem:
        require("objects")
        import fsspec

        protocol = self.url.partition("://")[0].lower()
        try:
            # A separate instance, so that its settings do not reach other users of fsspec in this process.
            filesystem = fsspec.filesystem(protocol, skip_instance_cache=True, **_options(protocol))
        except (ValueError, ImportError) as error:
            raise HpctrainError(
                "HT-url-unknown",
                "{url}: {problem}",
                "a URL that fsspec knows, for example s3://BUCKET/PREFIX",
                url=self.url,
                problem=str(error),
            ) from error
        if protocol in _S3:
            filesystem.retries = 1
        return filesystem


def _options(protocol: str) -> dict[str, Any]:
    """The options for a protocol, besides what the user has configured for fsspec."""
    if protocol not in _S3:
        return {}
    import fsspec.config

    configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
    seconds = OBJECT_TIMEOUT.read()
    limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
    # Parts that are fetched side by side would be a request each: several objects are fetched at a time anyway.
    return {"config_kwargs": {**configured, **limits}, "max_concurrency": 1}


def _connect(filesystem: AbstractFileSystem, seconds: float) -> None:
    """Make the client of S3, once. On a busy machine it takes seconds, which are none of the server's silence."""
    from fsspec.asyn import AsyncFileSystem, sync

    if isinstance(filesystem, AsyncFileSystem) and hasattr(filesystem, "set_session"):
        sync(filesystem.loop, filesystem.set_session, timeout=seconds)


def _get(filesystem: AbstractFileSystem, url: str, to: Path, limit: int, seconds: float) -> None:
    from fsspec.asyn import AsyncFileSystem, sync
    from fsspec.callbacks import Callback

    def stop_at_limit(size: int | None, value: int) -> None:
        if max(size or 0, value) > limit:
            raise _TooLongError(f"too long: it has more than {limit} bytes, which are the most")

    path = filesystem._strip_protocol(url)
    # Called with the size in the response's header, and with the bytes received so far.
    callback = Callback(hooks={"limit": stop_at_limit})
    if isinstance(filesystem, AsyncFileSystem):
        # What get_file does, which takes no timeout.
        sync(filesystem.loop, filesystem._get_file, path, str(to), callback=callback, timeout=seconds)
        return
    # Some file systems, the local one too, never call the callback of get_file.
    info = filesystem.info(path)
    if info["type"] != "file":
        raise IsADirectoryError(errno.EINVAL, "it is not a file")
    callback.set_size(info["size"])
    with filesystem.open(path, "rb") as source, to.open("wb") as file:
        while block := source.read(_BLOCK_BYTES):
            file.write(block)
            callback.relative_update(len(block))


def _compare(path: Path, sha256: str | None, size: int | None) -> None:
    digest, found = hash_of(path)
    if size is not None and found != size:
        how = "cut short" if found < size else "too long"
        raise _DamagedError(f"{how}: {found} bytes of {size}")
    if sha256 is not None and digest != sha256:
        raise _DamagedError("changed: its SHA-256 is not the one it was written with")


def _make_durable(fresh: Path, to: Path) -> None:
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    put_in_place(fresh, to)


def _is_local(error: BaseException, path: Path) -> TypeGuard[OSError]:
    """Whether the fault is this machine's, which cannot write the file."""
    return isinstance(error, OSError) and (error.errno in _DISK_FULL or error.filename == str(path))


def _words(error: Exception) -> str:
    """What was wrong. Every layer has timeouts of its own, some without a word, and no class of errors for all."""
    if type(error).__name__.endswith("TimeoutError"):
        return f"the server did not send it in time ({OBJECT_TIMEOUT.name})"
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
