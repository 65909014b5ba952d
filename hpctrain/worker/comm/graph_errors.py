"""Recovers errors of Python functions that TensorFlow calls inside a graph, and PyTorch when a future is set.

TensorFlow replaces them by an UnknownError, and PyTorch by a RuntimeError, which keep the text but neither the type nor
the exit code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from hpctrain.common.errors import HpctrainError

P = ParamSpec("P")
R = TypeVar("R")


# The last error of these functions. A graph runs in threads of TensorFlow, from which none reaches the caller.
_preserved: list[HpctrainError] = []


def preserve_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` for a graph or a future, so that :func:`original_error` finds its errors."""

    def preserving(*arguments: P.args, **settings: P.kwargs) -> R:
        try:
            return function(*arguments, **settings)
        except HpctrainError as error:
            # A copy: the frames and causes of the error itself hold every gradient.
            _preserved[:] = [copy.copy(error)]
            raise

    return preserving


def original_error(error: BaseException) -> BaseException:
    """The error raised inside the graph or future that ended with ``error``, once; another one is returned as it is."""
    of_library = type(error) is RuntimeError or type(error).__module__.startswith("tensorflow.")
    if of_library and _preserved and _preserved[0].message in str(error):
        return _preserved.pop()
    return error


@contextlib.contextmanager
def original_errors_raised() -> Iterator[None]:
    """A context manager from which an error raised inside a graph comes out as it was raised."""
    try:
        yield
    except Exception as error:
        original = original_error(error)
        if original is error:
            raise
        raise original from None
