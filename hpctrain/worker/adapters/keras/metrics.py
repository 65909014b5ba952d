"""Keras metrics over all ranks' samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.adapters.keras.ranks import of_all_ranks
from hpctrain.worker.adapters.keras.variables import check_same
from hpctrain.worker.comm import Communicator

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution

# What a metric may keep samples in that Keras does not join.
_OF_PYTHON = (list, dict, set, int, float, np.ndarray)
# Of the samples with which a metric is tried: none is worth less than any other.
_TRIED = 6


def patch_metrics(model: keras.Model, distribution: Distribution) -> None:
    """Note the metrics' states before a step, and let those see whole batches whose states cannot be added up."""
    compiled = model._compile_metrics
    if compiled is not None and not compiled.built and "build" not in vars(compiled):
        build = compiled.build

        # Keras builds them in the first step. Those that had variables already are not seen before it otherwise.
        def build_and_patch(y_true: Any, y_pred: Any) -> None:
            build(y_true, y_pred)
            patch_metrics(model, distribution)

        compiled.build = build_and_patch
    for metric in metrics_of(model):
        for variable in metric.variables:
            distribution.states.setdefault(id(variable), tf.identity(variable.value))
        kind = next(each for each in type(metric).__mro__ if "update_state" in vars(each))
        own = not kind.__module__.startswith("keras.")
        if own and distribution.comm.size > 1 and not isinstance(metric.update_state, _OfWholeBatches):
            metric.update_state = _OfWholeBatches(metric, distribution)


def drop_foreign_samples(model: keras.Model, distribution: Distribution) -> None:
    """Take back what metrics got on a rank without a sample of a batch: it computes another rank's."""
    assert distribution.share is not None
    for metric in metrics_of(model):
        for variable in () if gathers(metric) else metric.variables:
            # A metric that its first update has just built was in its reset state before, which is 0.
            before = distribution.states.get(id(variable), tf.zeros_like(variable.value))
            variable.assign(tf.where(distribution.share > 0, variable.value, before))


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, those given to ``compile`` one by one."""
    grouped = [(each.metrics if each is model._compile_metrics else [each]) for each in model.metrics]
    return [metric for group in grouped for metric in group]


class _OfWholeBatches:
    """The ``update_state`` of a metric, which gets the samples of all ranks if the ranks' states cannot be added up.

    Such are a maximum, the mean over batches of what a whole batch gives, and what is kept outside of Keras's
    variables.

    Attributes:
        gathers: whether it does, None before the first update.
    """

    def __init__(self, metric: keras.metrics.Metric, distribution: Distribution) -> None:
        self._metric = metric
        self._update = metric.update_state
        self._distribution = distribution
        self.gathers: bool | None = None
        self._said = False

    def __call__(self, *arguments: Any, **settings: Any) -> None:
        given = (arguments, settings)
        if self._distribution.share is None or not _have_rows(given):
            if self._distribution.share is not None and not self._said and _holds_number(given):
                self._said = True
                self._distribution.comm.say(
                    f"the metric {self._metric.name} gets one number for each rank's part of a batch. It counts them "
                    "alike, and its sums are those of all ranks: give it the samples, or use keras.metrics.Mean"
                )
            self._update(*arguments, **settings)
            return
        if self.gathers is None:
            with self._distribution.pausing():
                self.gathers = not _adds_up(self._metric, self._update, given)
        if self.gathers:
            arguments, settings = of_all_ranks(self._distribution, given)
        # Metrics and losses within this one take the samples that it got for a whole batch, as on one process.
        with self._distribution.pausing():
            self._update(*arguments, **settings)


def gathers(metric: keras.metrics.Metric) -> bool:
    """Whether every rank's state of this metric is that of the samples of all ranks."""
    return bool(getattr(metric.update_state, "gathers", False))


def _have_rows(given: Any) -> bool:
    """Whether these are tensors of numbers with a row for each sample, which can be gathered."""
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    kinds = (isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.dtype != tf.string for leaf in leaves)
    return bool(leaves) and all(kinds)


def _holds_number(given: Any) -> bool:
    """Whether a metric gets a number that may be a mean over samples, and not a count of them."""
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return any(np.ndim(leaf) == 0 and tf.as_dtype(getattr(leaf, "dtype", type(leaf))).is_floating for leaf in leaves)


def _adds_up(metric: keras.metrics.Metric, update: Any, given: Any) -> bool:
    """Whether the state of some samples is the sum of the states of two parts of them; false if that cannot be tried.

    The same on every rank, as it is tried with the same samples.
    """
    # The trial would change TensorFlow's own variables, which Keras neither lists nor resets.
    unlisted = any(isinstance(each, tf.Variable) for each in vars(metric).values())
    if unlisted or not metric.variables or any(variable.aggregation != "sum" for variable in metric.variables):
        return False
    random = np.random.default_rng(0)

    def made(tensor: Any) -> Any:
        if tensor is None:
            return None
        shape = [_TRIED, *(size or 3 for size in tensor.shape[1:])]
        values = random.random(shape) if tensor.dtype.is_floating else random.integers(0, 2, shape)
        return values.astype(tensor.dtype.as_numpy_dtype)

    samples = keras.tree.map_structure(made, given)

    def state(rows: slice) -> list[Any]:
        arguments, settings = keras.tree.map_structure(
            lambda values: values if values is None else tf.constant(values[rows]), samples
        )
        with keras.StatelessScope(zip(metric.variables, metric.stateless_reset_state(), strict=True)) as scope:
            update(*arguments, **settings)
        return [np.asarray(scope.get_current_value(variable), np.float64) for variable in metric.variables]

    own = {name: copy.copy(value) for name, value in vars(metric).items() if isinstance(value, _OF_PYTHON)}
    before = repr(own)
    try:
        with tf.init_scope():
            first, second, whole = state(slice(2)), state(slice(2, None)), state(slice(None))
    except Exception:
        # Samples of these shapes may mean nothing to a user's own metric.
        return False
    finally:
        kept = before == repr({name: vars(metric)[name] for name in own})
        vars(metric).update(own)
    if not kept:
        return False
    # A state that stays 0 shows nothing: that of a maximum above a limit does, where no sample exceeds the limit.
    return all(c.any() and np.allclose(a + b, c, rtol=1e-3) for a, b, c in zip(first, second, whole, strict=True))


@contextmanager
def whole_batch_values(distribution: Distribution) -> Iterator[None]:
    """Let a batch count once where a metric gets one value for all of it, which is that of all ranks' samples.

    Such values are made by functions that users give to ``compile`` for metrics. Keras gives the losses of several
    outputs to such a metric, and users their own trackers the loss of a batch.
    """
    mean, wrapper = keras.metrics.Mean, keras.metrics.MeanMetricWrapper
    mean_update, wrapper_update = mean.update_state, wrapper.update_state

    def counting_once(metric: Any, values: Any, sample_weight: Any = None) -> None:
        share = distribution.share
        if share is not None and sample_weight is None and not keras.tree.is_nested(values) and np.ndim(values) == 0:
            sample_weight = tf.cast(share, metric.dtype)
        mean_update(metric, values, sample_weight=sample_weight)

    def of_function(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        given = (y_true, y_pred)
        joins = distribution.share is not None and distribution.comm.size > 1 and _have_rows(given)
        if joins and np.ndim(metric._fn(*given, **metric._fn_kwargs)) == 0:
            y_true, y_pred = of_all_ranks(distribution, given)
        wrapper_update(metric, y_true, y_pred, sample_weight=sample_weight)

    mean.update_state, wrapper.update_state = counting_once, of_function
    try:
        yield
    finally:
        mean.update_state, wrapper.update_state = mean_update, wrapper_update


def join_metrics(comm: Communicator, model: keras.Model) -> dict[str, Any]:
    """Sum the state of the model's metrics over the ranks, and return the results by name.

    The state of every Keras metric is made of sums (of values and weights for a mean, of counts by threshold for
    AUC), which is why Keras marks its variables with ``aggregation="sum"``. So means come out weighted by the
    samples of each rank, and AUC is that of the joined samples. A metric that gets whole batches counts on one rank.

    Raises:
        HpctrainError: ranks have different metrics.
    """
    summed = [(v, metric) for metric in metrics_of(model) for v in metric.variables if v.aggregation == "sum"]
    check_same(comm, "metric variable", [f"{v.path} {tuple(v.shape)}" for v, _ in summed])
    if summed:
        own = [np.asarray(v.value.numpy(), dtype=np.float64) for v, _ in summed]
        counted = [
            np.zeros_like(array) if comm.rank and gathers(metric) else array
            for array, (_, metric) in zip(own, summed, strict=True)
        ]
        joined = comm.allreduce(np.concatenate([array.ravel() for array in counted]), "sum")
        ends = np.cumsum([array.size for array in own])
        for (variable, _), part, array in zip(summed, np.split(joined, ends[:-1]), own, strict=True):
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
