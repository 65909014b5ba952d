"""Losses and metrics of Keras over all ranks' samples.

A loss of Keras that is the mean over samples needs no correction: a rank's loss times its share of the batch has the
right mean over the ranks, and of a sum the factor is known. A user's own function may compute anything from a batch,
and so gets the samples of all ranks; so does a ``compute_loss`` of the user's own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.adapters.keras.whole_batch import has_rows, of_all_ranks, total
from hpctrain.worker.adapters.same_data import compare_models
from hpctrain.worker.comm import Communicator

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution


def patch_metrics(model: keras.Model, distribution: Distribution) -> None:
    """Let every update of a model's metrics within a step of ``fit`` count the samples of all ranks."""
    if distribution.comm.size == 1:
        return
    for compiled in (model._compile_metrics, model._compile_loss):
        # Keras makes those of ``compile`` in the first step.
        if compiled is not None and not compiled.built and "build" not in vars(compiled):
            compiled.build = functools.partial(_build_and_patch, compiled.build, model, distribution)
    for metric in _metrics_of(model):
        if getattr(metric.update_state, "distribution", None) is not distribution:
            metric.update_state = _OfAllRanks(metric, distribution)


def _build_and_patch(build: Callable[..., Any], model: keras.Model, distribution: Distribution, *given: Any) -> None:
    build(*given)
    patch_metrics(model, distribution)


def _metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, those given to ``compile`` one by one."""
    grouped = [(each.metrics if each is model._compile_metrics else [each]) for each in model.metrics]
    return [metric for group in grouped for metric in group]


def compare_metrics(comm: Communicator, model: keras.Model) -> None:
    """Refuse metrics that differ between ranks, which would add up each other's states. Collective."""
    compiled = model._compile_metrics
    given = [] if compiled is None else keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    named = (each for each in (*given, *model.metrics) if each is not None)
    compare_models(comm, "metric", [str(getattr(each, "name", getattr(each, "__name__", each))) for each in named])


class _OfAllRanks:
    """The ``update_state`` of a metric, which leaves the state of the samples of all ranks on every rank.

    The state of every Keras metric is made of sums (of values and weights for a mean, of counts by threshold for AUC),
    which is why Keras marks its variables with ``aggregation="sum"``. A user's own metric gets the samples of all
    ranks, since its state may be anything.
    """

    def __init__(self, metric: keras.metrics.Metric, distribution: Distribution) -> None:
        self._metric = metric
        self.distribution = distribution
        self._update = metric.update_state
        kind = next(each for each in type(metric).__mro__ if "update_state" in vars(each))
        function = metric._fn if kind is keras.metrics.MeanMetricWrapper else kind
        self._is_mean = kind is keras.metrics.Mean
        self._is_own = not getattr(function, "__module__", "").startswith("keras.")
        self._said = False

    def __call__(self, *arguments: Any, **settings: Any) -> None:
        given = (arguments, settings)
        if self.distribution.share is None:
            self._update(*arguments, **settings)
        elif self._is_own and _have_rows(given):
            arguments, settings = of_all_ranks(self.distribution, given)
            # Metrics and losses within this one take the samples that it got for a whole batch, as on one process.
            with self.distribution.pausing():
                self._update(*arguments, **settings)
        else:
            if self._is_own and not self._said and _holds_number(given):
                self._said = True
                self.distribution.comm.say(
                    f"the metric {self._metric.name} gets one number for each rank's part of a batch. It counts them "
                    "alike, and its sums are those of all ranks: give it the samples, or use keras.metrics.Mean"
                )
            before = {id(each): tf.identity(each.value) for each in self._metric.variables}
            self._update(*arguments, **(settings | self._weight(*arguments, **settings)))
            self._add_up(before)

    def _weight(self, values: Any = None, *weights: Any, **settings: Any) -> dict[str, tf.Tensor]:
        """The share as a weight, so that a batch counts once where a mean gets one value for all of it.

        Keras gives the losses of several outputs to such a mean, and users their own trackers the loss of a batch.
        """
        values, weighted = settings.get("values", values), weights or settings.get("sample_weight") is not None
        if not self._is_mean or weighted or keras.tree.is_nested(values) or np.ndim(values) != 0:
            return {}
        return {"sample_weight": tf.cast(self.distribution.share, self._metric.dtype)}

    def _add_up(self, before: dict[int, tf.Tensor]) -> None:
        """Replace what this rank's samples have added to the state by what those of all ranks add."""
        summed, share = [v for v in self._metric.variables if v.aggregation == "sum"], self.distribution.share
        if not summed or share is None:
            return
        # What its first update has made was 0 before.
        earlier = [before.get(id(each), tf.zeros_like(each.value)) for each in summed]
        added = [tf.cast(each.value - old, tf.float64) for each, old in zip(summed, earlier, strict=True)]
        flat = tf.concat([tf.reshape(each, [-1]) for each in added], axis=0)
        # A rank without a sample of the batch computes another rank's.
        sums = total(self.distribution.comm, tf.where(share > 0, flat, 0.0))
        parts = tf.split(sums, [math.prod(each.shape) for each in summed])
        for each, old, part in zip(summed, earlier, parts, strict=True):
            each.assign(old + tf.cast(tf.reshape(part, each.shape), each.dtype))


def _have_rows(given: Any) -> bool:
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return bool(leaves) and all(map(has_rows, leaves))


def _holds_number(given: Any) -> bool:
    """Whether a metric gets a number that may be a mean over samples, and not a count of them."""
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return any(np.ndim(leaf) == 0 and tf.as_dtype(getattr(leaf, "dtype", type(leaf))).is_floating for leaf in leaves)


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


def join_logs(comm: Communicator, logs: dict[str, Any]) -> None:
    """Replace the numbers in ``logs`` by their means over the ranks. Collective."""
    compare_models(comm, "logged value", sorted(logs))
    numbers = sorted(name for name in logs if np.ndim(logs[name]) == 0)
    if numbers:
        means = comm.allreduce(np.array([float(logs[name]) for name in numbers]), "mean")
        logs.update(zip(numbers, means.tolist(), strict=True))


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
        with distribution.pausing():
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
