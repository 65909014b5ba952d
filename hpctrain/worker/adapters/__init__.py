"""Entry points for both frameworks: each finds out whose value it was given, and imports only that adapter."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.gathering import gather, mean
from hpctrain.worker.adapters.recording import log, resumed_at
from hpctrain.worker.comm import Communicator, current

__all__ = [
    "average_statistics",
    "distribute",
    "gather",
    "log",
    "mean",
    "mean_loss",
    "no_sync",
    "resumed_at",
    "shard",
    "sum_loss",
]

ModelT = TypeVar("ModelT")
OptimizersT = TypeVar("OptimizersT")
LossT = TypeVar("LossT")
_MODEL = "a torch.nn.Module or a keras.Model"


def distribute(model: ModelT, optimizer: OptimizersT, **settings: Any) -> tuple[ModelT, OptimizersT]:
    """Make a model and its optimizer use the run's communicator; returns both.

    See :func:`hpctrain.worker.adapters.torch.distribute` and :func:`hpctrain.worker.adapters.keras.distribute` for the
    settings.

    Raises:
        HpctrainError: the model is neither a PyTorch module nor a Keras model.
    """
    distributed: tuple[ModelT, OptimizersT] = _adapter(model, _MODEL).distribute(model, optimizer, **settings)
    return distributed


def shard(data: Any, **settings: Any) -> Any:
    """Divide each batch over the ranks. In PyTorch its tensors are :class:`hpctrain.BatchTensor`.

    See :func:`hpctrain.worker.adapters.torch.shard` (a DataLoader) and :func:`hpctrain.worker.adapters.keras.shard` (a
    tf.data.Dataset or arrays) for the settings.

    Raises:
        HpctrainError: the data has another form.
    """
    return _adapter(data, "a torch DataLoader, a tf.data.Dataset or NumPy arrays").shard(data, **settings)


def mean_loss(total: LossT, count: Any, **settings: Any) -> LossT:
    """A mean over the ranks' samples: the sum of the ranks' ``total`` / that of ``count``. Collective.

    For losses that are computed from a rank's own samples: within a PyTorch model, which has this rank's rows, from
    samples that a script divides over the ranks itself, and in Keras. What is computed from a whole batch outside of
    models needs it not, and is not changed by it. In a model that adds a loss of its experts::

        def forward(self, x):
            hidden = self.experts(x)
            return hidden, ht.mean_loss(hidden.square().sum(), hidden.numel())

    After ``backward()`` the gradients are those of the mean of the whole batch, however its samples are divided. Such
    losses can be added to each other, and to any other. Where gradients of a rank's own samples are accumulated, give
    each part the ``count`` of all parts of the update that this rank computes: the values then add up to the mean.

    All ranks call it equally often, one without any tokens too (``count`` 0). In a pipeline, see ``count`` of
    :class:`hpctrain.Pipeline`.

    Args:
        total: a number with a gradient, in either framework: the sum over this rank's samples.
        count: what this rank's part of the sum is divided by, at least 0. It may have a gradient.
        settings: ``comm``, the ranks, by default those that :func:`hpctrain.init` joined; in Keras ``share`` too, see
            :func:`hpctrain.worker.adapters.keras.mean_loss`.

    Returns:
        The mean over all ranks, the same number on each of them. 0 without a gradient where nothing was counted on any
        rank.

    Raises:
        HpctrainError: a total that is not one number, or a count below 0.
    """
    mean: LossT = _adapter(total, "a tensor").mean_loss(total, count, **settings)
    return mean


def sum_loss(total: LossT, **settings: Any) -> LossT:
    """A sum over the ranks' samples (``reduction="sum"``), not divided by anything. Collective.

    For losses of a rank's own samples, as :func:`mean_loss`. After ``backward()`` the gradients are those of the sum
    over all ranks, which is also the value that is returned; without it they would be those of the mean over the ranks,
    too small by the number of ranks.

    Args:
        total: the sum over this rank's samples.
        settings: those of :func:`mean_loss`.
    """
    summed: LossT = _adapter(total, "a tensor").sum_loss(total, **settings)
    return summed


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
    from hpctrain.worker.adapters import torch as adapter

    return adapter.no_sync()


def _adapter(value: Any, wanted: str) -> Any:
    """The adapter of the framework whose class ``value`` is an instance of."""
    members = value if isinstance(value, tuple) else (value,)
    packages = {kind.__module__.partition(".")[0] for member in members for kind in type(member).__mro__}
    if "torch" in packages:
        return importlib.import_module("hpctrain.worker.adapters.torch")
    if packages & {"keras", "tensorflow"} or (packages & {"numpy"} and "keras" in sys.modules):
        return importlib.import_module("hpctrain.worker.adapters.keras")
    raise HpctrainError(
        "HT-argument-not-valid",
        "{module}.{kind} is not {wanted}",
        module=type(value).__module__,
        kind=type(value).__name__,
        wanted=wanted,
    )
