"""Keras metrics over all ranks' samples."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpctrain.worker.adapters.keras.variables import check_same
from hpctrain.worker.comm import Communicator


def join_metrics(comm: Communicator, model: keras.Model) -> dict[str, Any]:
    """Sum the state of the model's metrics over the ranks, and return the results by name.

    The state of every Keras metric is made of sums (of values and weights for a mean, of counts by threshold for
    AUC), which is why Keras marks its variables with ``aggregation="sum"``. So means come out weighted by the
    samples of each rank, and AUC is that of the joined samples.

    Raises:
        HpctrainError: ranks have different metrics.
    """
    variables = [v for metric in model.metrics for v in metric.variables if v.aggregation == "sum"]
    check_same(comm, "metric variable", [f"{v.path} {tuple(v.shape)}" for v in variables])
    if variables:
        own = [np.asarray(v.value.numpy(), dtype=np.float64) for v in variables]
        joined = comm.allreduce(np.concatenate([array.ravel() for array in own]), "sum")
        ends = np.cumsum([array.size for array in own])
        for variable, part, array in zip(variables, np.split(joined, ends[:-1]), own, strict=True):
            variable.assign(part.reshape(array.shape).astype(variable.value.dtype.as_numpy_dtype))
    return flatten(model.get_metrics_result())


def join_logs(comm: Communicator, logs: dict[str, Any], results: dict[str, Any]) -> None:
    """Replace the values in ``logs`` that ``results`` has; values without a metric become their mean over the ranks.

    Raises:
        HpctrainError: ranks log different keys.
    """
    check_same(comm, "logged value", sorted(logs))
    logs.update({name: results[name] for name in logs if name in results})
    others = sorted(name for name in logs if name not in results and np.ndim(logs[name]) == 0)
    if others:
        means = comm.allreduce(np.array([float(logs[name]) for name in others]), "mean")
        logs.update(zip(others, means.tolist(), strict=True))


def flatten(results: dict[str, Any]) -> dict[str, Any]:
    """Results by name: numbers, and one entry for each class where a metric has a value per class."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(flatten(value))
        else:
            flat[name] = float(value) if np.ndim(value) == 0 else np.asarray(value)
    return flat
