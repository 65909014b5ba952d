"""Changes modules of others as soon as a script imports them, so that one that never does need not wait for them."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_Change = Callable[[ModuleType], None]


def change_after_import(changes: Mapping[str, _Change]) -> None:
    """Call each change, by the module's name, with the module: now if it is imported already, else once it is."""
    for name, change in changes.items():
        # None stands there for a module that must not be imported.
        if sys.modules.get(name):
            # Another thread may still execute it: this waits for it.
            change(importlib.import_module(name))
        else:
            _finder.changes[name].append(change)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _AfterImport(MetaPathFinder):
    """Finds modules as the other finders do, and changes some of them once they have been executed."""

    def __init__(self) -> None:
        self.changes: defaultdict[str, list[_Change]] = defaultdict(list)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        # Python too leaves out finders of the time before find_spec.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            for change in self.changes.pop(fullname, ()):
                change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()
