"""Entry points for both frameworks: each finds out whose value it was given, and imports only that adapter."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from hpctrain.adapters.gathering import gather, mean
from hpctrain.adapters.recording import log
from hpctrain.comm import Communicator, current
from hpctrain.errors import HpctrainError

__all__ = ["average_statistics", "distribute", "gather", "join", "log", "mean", "no_sync", "shard"]

_MODEL = "a torch.nn.Module or a keras.Model"


def distribute(model: Any, optimizer: Any, **settings: Any) -> tuple[Any, Any]:
    """Make a model and its optimizer use the run's communicator; returns both.

    See :func:`hpctrain.adapters.torch.distribute` and :func:`hpctrain.adapters.keras.distribute` for the settings.

    Raises:
        HpctrainError: the model is neither a PyTorch module nor a Keras model.
    """
    return _adapter(model, _MODEL).distribute(model, optimizer, **settings)  # type: ignore[no-any-return]


def shard(data: Any, **settings: Any) -> Any:
    """Give this rank its part of each batch.

    See :func:`hpctrain.adapters.torch.shard` (a DataLoader) and :func:`hpctrain.adapters.keras.shard` (a
    tf.data.Dataset or arrays) for the settings.
    """
    return _adapter(data, "a torch DataLoader, a tf.data.Dataset or NumPy arrays").shard(data, **settings)


def join(model: Any, **settings: Any) -> AbstractContextManager[None]:
    """A context manager for a PyTorch loop whose number of batches differs between ranks: ranks that finish early wait
    for the others.

    See :func:`hpctrain.adapters.torch.join` for the settings.
    """
    from hpctrain.adapters import torch as adapter

    return adapter.join(model, **settings)


def average_statistics(model: Any, *, comm: Communicator | None = None) -> None:
    """Replace the running statistics of a model's batch normalisation by their mean over the ranks. Collective.

    During training each rank normalises with its own samples, so its running mean and variance are its own, and an
    evaluation or a saved model would reflect only rank 0's samples. All ranks call it at the same place, after an epoch
    and before they evaluate or rank 0 saves::

        ht.average_statistics(model)
        model.eval()

    Within ``fit`` the callbacks of ``ht.keras.callbacks()`` do this after each epoch and before each evaluation.

    Args:
        model: a PyTorch module or a Keras model.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Raises:
        HpctrainError: the model is neither a PyTorch module nor a Keras model.
    """
    _adapter(model, _MODEL).average_statistics(model, comm or current())


def no_sync() -> AbstractContextManager[None]:
    """A context manager in which PyTorch's ``backward()`` accumulates gradients on this rank and reduces nothing."""
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
