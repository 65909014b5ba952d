"""The networks that recipes name, one definition a framework."""

from __future__ import annotations

import importlib
from typing import Any

from hpctrain.recipes.schema import Framework

_FAMILY = {"digits_cnn": "digits"}


def build(name: str, framework: Framework) -> Any:
    """A new network with freshly drawn weights: a ``torch.nn.Module`` or a ``keras.Model``."""
    module = importlib.import_module(f"hpctrain.models.{framework}_{_FAMILY[name]}")
    return getattr(module, name)()
