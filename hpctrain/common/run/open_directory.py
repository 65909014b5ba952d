"""A run's directory, held by its inode, so that a rename or a deletion while the run goes on is noticed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self, TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.run.directory import RunDirectory

E = TypeVar("E", bound=BaseException)

_BY_NUMBER = re.compile(r"/proc/self/fd/\d+/")
# A single failed look can be the file server's fault.
_LOOKS = 2


class HeldDirectory:
    """A run directory that this process keeps open from now on, and finds again after it was renamed.

    ``named`` is the directory under the name that it had at first.

    That it is open also shows that the process belongs to the run (see :mod:`hpctrain.common.run.records`).

    Raises:
        HpctrainError: it cannot be opened.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.named = directory
        # A script may change its working directory.
        self._path = directory.path.absolute()
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise HpctrainError(
                "HT-run-directory-gone",
                "{path} was moved or deleted before it was used",
                "after a move, hpctrain run --resume goes on at the new place; otherwise start the run anew",
                exit_code=1,
                path=self._path,
            ) from None
        except OSError as error:
            raise disk_error(error, self._path) from error
        self._identity = _identity(os.fstat(self._descriptor))
        self._in_vain = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def lost(self) -> str | None:
        """What became of the directory, in words, once two looks in a row have found that; None while it is there."""
        fate = self.fate()
        self._in_vain = self._in_vain + 1 if fate else 0
        return fate if self._in_vain >= _LOOKS else None

    def fate(self) -> str | None:
        """What became of the directory by a single look."""
        if (now := self.now()) is None:
            return f"{self.named.path}, or its {self.named.plan.name}, was deleted while the run used it"
        return None if now == self.named else f"{self.named.path} was moved to {now.path} while the run used it"

    @property
    def work(self) -> RunDirectory:
        """The directory by its descriptor, whatever its name is now: for files, not for words."""
        return RunDirectory(Path(f"/proc/self/fd/{self._descriptor}"))

    def in_words(self, error: E) -> E:
        """An error with the directory's name in place of what :attr:`work` calls it."""
        if isinstance(error, HpctrainError):
            # A path may name another rank's descriptor of the directory, which has another number.
            error.message, error.hint = map(self._named_in, (error.message, error.hint))
            paths = {name: value for name, value in error.values.items() if isinstance(value, (str, Path))}
            error.values |= {name: self._named_in(str(value)) for name, value in paths.items()}
        return error

    def _named_in(self, text: str) -> str:
        return _BY_NUMBER.sub(f"{self.named.path}/", text)

    def now(self) -> RunDirectory | None:
        """The directory, under the name that it has now; None if it was deleted."""
        try:
            self.work.plan.stat()
        except FileNotFoundError:
            return None
        except OSError:
            # A file server that does not answer has deleted nothing.
            return self.named
        if self._is_at(self._path, otherwise=True):
            return self.named
        # After a rename on another host, the kernel here may not know the new name.
        path = self.work.path.readlink()
        return RunDirectory(path) if self._is_at(path, otherwise=False) else self.work

    def _is_at(self, path: Path, *, otherwise: bool) -> bool:
        """Whether it is at a path; ``otherwise`` where that cannot be seen."""
        try:
            return _identity(path.stat()) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return otherwise


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
