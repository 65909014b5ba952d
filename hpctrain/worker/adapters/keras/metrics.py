"""Keras metrics over all ranks' samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.adapters.keras.distribution import in_whole_batch
from hpctrain.worker.adapters.keras.variables import check_same
from hpctrain.worker.adapters.keras.whole_batch import has_rows, of_all_ranks, total
from hpctrain.worker.comm import Communicator

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution


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
        if _is_own(metric) and distribution.comm.size > 1 and not isinstance(metric.update_state, _OfWholeBatches):
            metric.update_state = _OfWholeBatches(metric, distribution)


def _is_own(metric: keras.metrics.Metric) -> bool:
    """Whether a metric, or the function that it is the mean of, is the user's own."""
    kind = next(each for each in type(metric).__mro__ if "update_state" in vars(each))
    function = metric._fn if kind is keras.metrics.MeanMetricWrapper else kind
    return not getattr(function, "__module__", "").startswith("keras.")


def drop_foreign_samples(model: keras.Model, distribution: Distribution) -> None:
    """Take back what metrics got on a rank without a sample of a batch: it computes another rank's."""
    for metric in metrics_of(model):
        for variable in () if gathers(metric) else metric.variables:
            variable.assign(_counted(variable, distribution))


def _counted(variable: keras.Variable, distribution: Distribution) -> tf.Tensor:
    """The value of a metric's variable from before the step on a rank without a sample of the batch."""
    assert distribution.share is not None
    # A metric that its first update has just built was in its reset state before, which is 0.
    before = distribution.states.get(id(variable), tf.zeros_like(variable.value))
    return tf.where(distribution.share > 0, variable.value, before)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, those given to ``compile`` one by one."""
    grouped = [(each.metrics if each is model._compile_metrics else [each]) for each in model.metrics]
    return [metric for group in grouped for metric in group]


class _OfWholeBatches:
    """The ``update_state`` of a user's own metric, which gets the samples of all ranks: its state may be anything.

    Attributes:
        gathers: whether it has got any.
    """

    def __init__(self, metric: keras.metrics.Metric, distribution: Distribution) -> None:
        self._metric = metric
        self._update = metric.update_state
        self._distribution = distribution
        self.gathers = False
        self._said = False

    def __call__(self, *arguments: Any, **settings: Any) -> None:
        given = (arguments, settings)
        self.gathers |= in_whole_batch()
        if self._distribution.share is None or not _have_rows(given):
            if self._distribution.share is not None and not self._said and _holds_number(given):
                self._said = True
                self._distribution.comm.say(
                    f"the metric {self._metric.name} gets one number for each rank's part of a batch. It counts them "
                    "alike, and its sums are those of all ranks: give it the samples, or use keras.metrics.Mean"
                )
            self._update(*arguments, **settings)
            return
        self.gathers = True
        arguments, settings = of_all_ranks(self._distribution, given)
        # Metrics and losses within this one take the samples that it got for a whole batch, as on one process.
        with self._distribution.pausing():
            self._update(*arguments, **settings)


def gathers(metric: keras.metrics.Metric) -> bool:
    """Whether every rank's state of this metric is that of the samples of all ranks."""
    return bool(getattr(metric.update_state, "gathers", False))


def _have_rows(given: Any) -> bool:
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return bool(leaves) and all(map(has_rows, leaves))


def _holds_number(given: Any) -> bool:
    """Whether a metric gets a number that may be a mean over samples, and not a count of them."""
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return any(np.ndim(leaf) == 0 and tf.as_dtype(getattr(leaf, "dtype", type(leaf))).is_floating for leaf in leaves)


@contextmanager
def counting_on_one_rank(model: keras.Model, distribution: Distribution) -> Iterator[None]:
    """A context manager within a step, in which every rank computes the same from the samples of all ranks."""
    before = [(each, tf.identity(each.value), metric) for metric in metrics_of(model) for each in metric.variables]
    with distribution.pausing():
        yield
    for variable, value, metric in before if distribution.comm.rank else ():
        if not gathers(metric):
            variable.assign(value)


@contextmanager
def results_of_all_ranks(model: keras.Model, distribution: Distribution) -> Iterator[None]:
    """Let a step of the user's own get what the metrics come to on the samples of all ranks."""
    changed = [metric for metric in metrics_of(model) if "result" not in vars(metric)]

    def joined(metric: keras.metrics.Metric, result: Callable[[], Any]) -> Any:
        if distribution.share is None or gathers(metric) or any(each.aggregation != "sum" for each in metric.variables):
            return result()
        own = [_counted(each, distribution) for each in metric.variables]
        sums = total(distribution.comm, tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) for each in own], 0))
        parts = tf.split(sums, [tf.size(each) for each in own])
        state = [tf.cast(tf.reshape(part, each.shape), each.dtype) for part, each in zip(parts, own, strict=True)]
        with keras.StatelessScope(zip(metric.variables, state, strict=True)):
            return result()

    for metric in changed:
        metric.result = functools.partial(joined, metric, metric.result)
    try:
        yield
    finally:
        for metric in changed:
            del metric.result


def whole_batch_logs(distribution: Distribution, logs: Any) -> Any:
    """What a step of the user's own returns, where numbers are their means over the ranks, weighted by the share."""
    share = distribution.share
    numbers = [name for name, value in logs.items() if _is_number(value)] if isinstance(logs, dict) else []
    if not numbers or share is None:
        return logs
    own = [tf.cast(tf.convert_to_tensor(logs[name]), tf.float64) for name in numbers]
    share = tf.cast(share, tf.float64)
    # A rank without a sample of its own computes another rank's, whose NaN must not count.
    parts = [tf.where(share > 0, each * share / distribution.comm.size, 0.0) for each in own]
    means = tf.unstack(total(distribution.comm, tf.stack(parts)))
    return logs | {name: tf.cast(mean, logs[name].dtype) for name, mean in zip(numbers, means, strict=True)}


def _is_number(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank == 0 and value.dtype.is_floating


@contextmanager
def whole_batch_values(distribution: Distribution) -> Iterator[None]:
    """Let a batch count once where a mean gets one value for all of it, which is that of all ranks' samples.

    Keras gives the losses of several outputs to such a metric, and users their own trackers the loss of a batch.
    """
    mean = keras.metrics.Mean
    update = mean.update_state

    def counting_once(metric: Any, values: Any, sample_weight: Any = None) -> None:
        share = distribution.share
        if share is not None and sample_weight is None and not keras.tree.is_nested(values) and np.ndim(values) == 0:
            sample_weight = tf.cast(share, metric.dtype)
        update(metric, values, sample_weight=sample_weight)

    mean.update_state = counting_once
    try:
        yield
    finally:
        mean.update_state = update


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
    """Replace the values in ``logs`` by ``results``, or by their means over the ranks if not all are metrics.

    Keras as well takes the metrics' results where the names agree, and else what a step of the user's own returned.

    Raises:
        HpctrainError: ranks log different keys.
    """
    check_same(comm, "logged value", sorted(logs))
    if set(logs) == set(results):
        logs.update(results)
        return
    numbers = sorted(name for name in logs if np.ndim(logs[name]) == 0)
    if numbers:
        means = comm.allreduce(np.array([float(logs[name]) for name in numbers]), "mean")
        logs.update(zip(numbers, means.tolist(), strict=True))


def flatten(results: dict[str, Any]) -> dict[str, Any]:
    """Results by name: numbers, and one entry for each class where a metric has a value per class."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(flatten(value))
        else:
            flat[name] = float(value) if np.ndim(value) == 0 else np.asarray(value)
    return flat
