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
    """A run directory that this process keeps open from now on.

    That it is open also shows that the process belongs to the run (see :mod:`hpctrain.common.run.records`).

    Attributes:
        named: the directory under the name that it had at first.
        work: the directory by its descriptor, whatever its name is now: for files, not for words.

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
            raise self.error() from None
        except OSError as error:
            raise disk_error(error, self._path) from error
        self.work = RunDirectory(Path(f"/proc/self/fd/{self._descriptor}"))
        self._identity = _identity(os.fstat(self._descriptor))
        self._in_vain = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._descriptor)

    def error(self) -> HpctrainError:
        """The error of a run whose directory is gone."""
        return HpctrainError(
            "HT-run-directory-gone",
            "{path} was moved or deleted while the run used it",
            "after a move, hpctrain run --resume --run-dir with its new name goes on; otherwise start the run anew",
            exit_code=1,
            path=self._path,
        )

    def lost(self) -> str | None:
        """That the directory was moved or deleted, once two looks in a row have found that; None while it is there."""
        self._in_vain = self._in_vain + 1 if self.gone() else 0
        return self.error().message if self._in_vain >= _LOOKS else None

    def gone(self) -> bool:
        """Whether the directory is not where it was, or its plan was deleted, by a single look."""
        try:
            self.work.plan.stat()
            return _identity(self._path.stat()) != self._identity
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            # A file server that does not answer has moved nothing.
            return False

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


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
