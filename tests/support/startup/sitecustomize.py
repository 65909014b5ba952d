"""Ranks begin in warm interpreters; TensorFlow and Keras without what they import only because it is there.

Python imports this module in every process that the tests start. After the start these packages can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import warm_start

_OPTIONAL = ("jax", "matplotlib", "sklearn")


class _WithoutOptional:
    """Refuses the packages while TensorFlow or Keras is being imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _OPTIONAL and any(_begins(package) for package in ("tensorflow", "keras")):
            raise ModuleNotFoundError(f"no {name} for the start of TensorFlow and Keras in tests", name=name)
        return None


def _begins(package: str) -> bool:
    spec = getattr(sys.modules.get(package), "__spec__", None)
    return getattr(spec, "_initializing", False)


sys.meta_path.insert(0, _WithoutOptional)

warm_start.begin()
