"""Programs of ranks as modules, for their cases and for what one process computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def imported(program: Path) -> ModuleType:
    """A file as a module of its own name, which what it defines can be pickled by."""
    # As for the rank that runs it: its folder is where it finds the programs beside it.
    if str(program.parent) not in sys.path:
        sys.path.append(str(program.parent))
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    return module
