"""Makes a file that several ranks save under one name whole at any moment.

A script for one process saves its model on each rank, and may read it at once: written in place, a rank would read what
another is just writing. Each writes a file of its own first and then puts it in the other's place. Ranks that hold the
same save the same, and files that have a rank in their name are as they were.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.worker.comm.after_import import change_after_import

# The functions that save, by module, with the name of the argument that is a path; and a package that has one too.
_SAVING = {"torch.serialization": ("save", "f"), "safetensors.torch": ("save_file", "filename")}
_PACKAGES = {"torch.serialization": "torch"}


def save_whole_files() -> None:
    """Save whole files from now on. Called before the script begins, on runs of several ranks."""
    change_after_import(dict.fromkeys(_SAVING, _change))


def _change(module: ModuleType) -> None:
    name, place = _SAVING[module.__name__]
    wrapped = _whole(getattr(module, name), place)
    # The package has it already where it was imported before.
    for namespace in (module, sys.modules.get(_PACKAGES.get(module.__name__, ""))):
        if namespace is not None and hasattr(namespace, name):
            setattr(namespace, name, wrapped)


def _whole(save: Callable[..., Any], place: str) -> Callable[..., Any]:
    """A function that saves whole files, if its argument of the name ``place`` is a path."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saving(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        if not isinstance(bound.arguments[place], str | os.PathLike):
            return save(*arguments, **settings)
        with replacing(Path(bound.arguments[place])) as path:
            bound.arguments[place] = path
            return save(*bound.args, **bound.kwargs)

    return saving


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context manager for the path of a file that takes another's place at its end, unless there is an error."""
    target = path.resolve()
    writable = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    if not writable or (target.exists() and not target.is_file()):
        # Whatever there is to say, a device, or a file in a folder that takes no others.
        yield path
        return
    # A folder, since the name is a part of what PyTorch writes.
    with tempfile.TemporaryDirectory(prefix=".hpctrain-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        path = Path(folder) / target.name
        yield path
        if target.exists():
            shutil.copymode(target, path)
        path.replace(target)
