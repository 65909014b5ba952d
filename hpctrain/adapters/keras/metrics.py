"""Keras metrics over the data of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpctrain.adapters.keras.variables import check_same
from hpctrain.comm import Communicator


def join_metrics(comm: Communicator, model: keras.Model) -> dict[str, float]:
    """Add up the state of the model's metrics over the ranks, and give the results of the joined state by name.

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


def join_logs(comm: Communicator, logs: dict[str, float], results: dict[str, float]) -> None:
    """Replace in ``logs`` what ``results`` knows; values that no metric stands behind become the mean of the ranks.

    Raises:
        HpctrainError: ranks log different keys.
    """
    names = sorted(logs)
    check_same(comm, "logged value", names)
    means = comm.allreduce(np.array([float(logs[name]) for name in names]), "mean")
    logs.update(zip(names, means.tolist(), strict=True))
    logs.update({name: value for name, value in results.items() if name in logs})


def flatten(results: dict[str, Any]) -> dict[str, float]:
    """Nested results of a metric with several values, as numbers by name."""
    flat: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(flatten(value))
        elif np.ndim(value) == 0:
            flat[name] = float(value)
    return flat
