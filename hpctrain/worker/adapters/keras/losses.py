"""Losses whose mean over the ranks is not the loss of the global batch, corrected so that it is.

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
import tensorflow as tf

from hpctrain.worker.adapters.keras.metrics import counting_on_one_rank
from hpctrain.worker.adapters.keras.whole_batch import of_all_ranks, total

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution


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
