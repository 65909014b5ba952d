"""Losses and metrics of Keras over all ranks' samples.

A loss of Keras that is the mean over samples needs no correction: a rank's loss times its share of the batch has the
right mean over the ranks, and of a sum the factor is known. A user's own function may compute anything from a batch,
and so gets the samples of all ranks; so does a ``compute_loss`` of the user's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.adapters.keras.distribution import in_whole_batch
from hpctrain.worker.adapters.keras.whole_batch import has_rows, of_all_ranks, total
from hpctrain.worker.adapters.same_data import compare_models
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
    """
    summed = [(v, metric) for metric in metrics_of(model) for v in metric.variables if v.aggregation == "sum"]
    compare_models(comm, "metric variable", [f"{v.path} {tuple(v.shape)}" for v, _ in summed])
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
    """
    compare_models(comm, "logged value", sorted(logs))
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


def patch_compute_loss(model: keras.Model, distribution: Distribution) -> None:
    """Let a ``compute_loss`` of the user's own get the samples of all ranks within a step of ``fit``."""
    own = inspect.getattr_static(model, "compute_loss")
    if distribution.comm.size == 1 or own.__module__.startswith("keras."):
        return
    compute_loss = model.compute_loss

    @functools.wraps(compute_loss)
    def of_whole_batch(*arguments: Any, **settings: Any) -> Any:
        if distribution.share is None:
            return compute_loss(*arguments, **settings)
        arguments, settings = of_all_ranks(distribution, (arguments, settings))
        with counting_on_one_rank(model, distribution):
            return compute_loss(*arguments, **settings)

    model.compute_loss = of_whole_batch


@contextmanager
def whole_batch_losses(distribution: Distribution) -> Iterator[None]:
    """Let the losses that a step calls, those of ``compile`` and of the user's own, be those of the global batch."""
    kinds = {kind: kind.__call__ for kind in _kinds_of_losses()}

    def calling(kind: type[keras.losses.Loss], call: Callable[..., Any]) -> Callable[..., Any]:
        def of_global_batch(loss: Any, *given: Any, **named: Any) -> tf.Tensor:
            own_way = kind is not keras.losses.Loss
            if distribution.share is None or distribution.comm.size == 1 or (not own_way and _is_unreduced(loss)):
                return call(loss, *given, **named)
            if not own_way and not _compares_samples(loss):
                with _values_of(loss) as values:
                    own = call(loss, *given, **named)
                if values[0].shape.rank:
                    y_pred = given[1] if len(given) > 1 else named["y_pred"]
                    return own * _factor(loss, distribution, _mask_of(y_pred, values[0]), own.dtype)
            # A function of a whole batch cannot be joined from its parts.
            given, named = of_all_ranks(distribution, (given, named))
            with distribution.pausing():
                return call(loss, *given, **named)

        return of_global_batch

    for kind, call in kinds.items():
        kind.__call__ = calling(kind, call)
    try:
        yield
    finally:
        for kind, call in kinds.items():
            kind.__call__ = call


def _kinds_of_losses() -> list[type[keras.losses.Loss]]:
    """Keras's base class, and the script's classes that reduce in a way of their own."""
    kinds = [keras.losses.Loss]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Keras's own that is called in another way adds up the losses of a model, which are each of the whole batch.
    own = (kind for kind in dict.fromkeys(kinds[1:]) if "__call__" in vars(kind))
    return [keras.losses.Loss, *(kind for kind in own if not kind.__module__.startswith("keras."))]


def _is_unreduced(loss: keras.losses.Loss) -> bool:
    """Whether it gives a value for each sample."""
    return loss.reduction in (None, "none")


def _factor(loss: keras.losses.Loss, distribution: Distribution, mask: tf.Tensor | None, dtype: Any) -> tf.Tensor:
    """What makes of a rank's loss one whose mean over the ranks, each times its share, is that of the global batch."""
    share, size = tf.cast(distribution.share, tf.float64), distribution.comm.size
    # The ranks' sums are averaged later, so each is scaled up by the number of ranks; 0 for a rank without a sample.
    per_share = tf.math.divide_no_nan(tf.cast(size, tf.float64), share)
    if loss.reduction == "sum":
        return tf.cast(per_share, dtype)
    if mask is None:
        return tf.ones([], dtype)
    # A mean over unmasked entries counts by their share of those of all ranks.
    count = tf.cast(tf.math.count_nonzero(mask), tf.float64) * tf.cast(share > 0, tf.float64)
    return tf.cast(tf.math.divide_no_nan(count, total(distribution.comm, count)) * per_share, dtype)


def _compares_samples(loss: keras.losses.Loss) -> bool:
    """Whether the loss may be anything but a sum over samples, divided by their number."""
    kind = next(each for each in type(loss).__mro__ if "call" in vars(each))
    function = getattr(loss, "fn", loss)
    of_keras = all(getattr(each, "__module__", "").startswith("keras.") for each in (kind, function))
    # The value of Circle for one sample compares it with all others of the batch.
    return not of_keras or isinstance(loss, keras.losses.Circle) or loss.reduction == "mean_with_sample_weight"


@contextmanager
def _values_of(loss: keras.losses.Loss) -> Iterator[list[tf.Tensor]]:
    """A context manager with a list that gets what ``call`` of a loss gives before it is reduced."""
    call, values, before = loss.call, list[tf.Tensor](), vars(loss).get("call")

    def noting(*given: Any, **named: Any) -> Any:
        values.append(call(*given, **named))
        return values[0]

    loss.call = noting
    try:
        yield values
    finally:
        del loss.call
        if before is not None:
            loss.call = before


def _mask_of(y_pred: Any, values: tf.Tensor) -> tf.Tensor | None:
    masks = [mask for mask in (getattr(each, "_keras_mask", None) for each in (y_pred, values)) if mask is not None]
    return functools.reduce(tf.logical_and, masks) if masks else None
