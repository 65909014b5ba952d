"""Recovers errors of Python functions that TensorFlow calls inside a graph.

TensorFlow replaces them by an UnknownError, which keeps the text but neither the type nor the exit code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from hpctrain.common.errors import HpctrainError

P = ParamSpec("P")
R = TypeVar("R")

# The last error. A graph runs in threads of TensorFlow, from which no exception reaches the caller.
_noted: HpctrainError | None = None


def noting(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` for a graph, so that :func:`original` finds its errors."""

    def noted(*arguments: P.args, **settings: P.kwargs) -> R:
        global _noted
        try:
            return function(*arguments, **settings)
        except HpctrainError as error:
            # A copy: the frames and causes of the error itself hold every gradient.
            _noted = copy.copy(error)
            raise

    return noted


def original(error: BaseException) -> BaseException:
    """The error raised inside the graph that ended with ``error``, once; any other error is returned as it is."""
    global _noted
    of_tensorflow = type(error).__module__.startswith("tensorflow.")
    if not (of_tensorflow and _noted and _noted.message in str(error)):
        return error
    found, _noted = _noted, None
    return found


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """A context manager from which an error raised inside a graph comes out as it was raised."""
    try:
        yield
    except Exception as error:
        found = original(error)
        if found is error:
            raise
        raise found from None
