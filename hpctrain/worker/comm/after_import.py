"""Changes modules of others as soon as a script imports them, so that one that never does need not wait for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def change_after_import(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each change, by the module's name, with the module: now if it is imported already, else once it is."""
    sys.meta_path.insert(0, _AfterImport(changes))


class _AfterImport(MetaPathFinder):
    """Finds modules as the other finders do, and changes some of them once they have been executed."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = dict(changes)
        for name in [name for name in self._changes if name in sys.modules]:
            self._changes.pop(name)(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            if change := self._changes.pop(fullname, None):
                change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec
