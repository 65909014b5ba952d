"""The entry points that serve either framework: they find out which one a value belongs to, and import only that."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from hpctrain.errors import HpctrainError

__all__ = ["distribute", "no_sync", "shard"]


def distribute(model: Any, optimizer: Any, **settings: Any) -> tuple[Any, Any]:
    """Make a model and its optimizer use the run's communicator; returns both.

    See :func:`hpctrain.adapters.torch.distribute` and :func:`hpctrain.adapters.keras.distribute` for the settings.

    Raises:
        HpctrainError: the model is neither a PyTorch module nor a Keras model.
    """
    return _adapter(model, "a torch.nn.Module or a keras.Model").distribute(model, optimizer, **settings)  # type: ignore[no-any-return]


def shard(data: Any, **settings: Any) -> Any:
    """Give this rank its part of each batch.

    See :func:`hpctrain.adapters.torch.shard` (a DataLoader) and :func:`hpctrain.adapters.keras.shard` (a
    tf.data.Dataset or arrays) for the settings.
    """
    return _adapter(data, "a torch DataLoader, a tf.data.Dataset or NumPy arrays").shard(data, **settings)


def no_sync() -> AbstractContextManager[None]:
    """Within it, PyTorch's ``backward()`` adds up gradients on this rank and reduces nothing."""
    from hpctrain.adapters import torch as adapter

    return adapter.no_sync()


def _adapter(value: Any, wanted: str) -> Any:
    """The adapter of the framework whose class ``value`` is an instance of."""
    members = value if isinstance(value, tuple) else (value,)
    packages = {kind.__module__.partition(".")[0] for member in members for kind in type(member).__mro__}
    if "torch" in packages:
        return importlib.import_module("hpctrain.adapters.torch")
    if packages & {"keras", "tensorflow"} or (packages & {"numpy"} and "keras" in sys.modules):
        return importlib.import_module("hpctrain.adapters.keras")
    raise HpctrainError(f"{type(value).__module__}.{type(value).__name__} is not {wanted}")
