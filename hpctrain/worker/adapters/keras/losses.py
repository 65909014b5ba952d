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

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.metrics import counting_on_one_rank
from hpctrain.worker.adapters.keras.ranks import of_all_ranks, total

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution

# The wrapped losses that are being computed.
_wrapped: list[_OfGlobalBatch] = []


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


def patch_losses(model: keras.Model, distribution: Distribution) -> None:
    """Make every loss that ``compile`` got compute the loss of the global batch, from its next use on."""
    compiled = model._compile_loss
    if compiled is None:
        return

    def wrap() -> None:
        compiled._flat_losses = [
            each
            if isinstance(each.loss, _OfGlobalBatch)
            else each._replace(loss=_OfGlobalBatch(each.loss, distribution))
            for each in compiled._flat_losses
        ]

    if compiled.built:
        wrap()
    elif "build" not in vars(compiled):
        build = compiled.build

        # Keras builds it at its first use, which never comes in some train_steps of users.
        def build_and_wrap(y_true: Any, y_pred: Any) -> None:
            build(y_true, y_pred)
            wrap()

        compiled.build = build_and_wrap


@contextmanager
def whole_batch_losses(distribution: Distribution) -> Iterator[None]:
    """Let the losses that a ``train_step`` of the user's own calls be those of the global batch too."""
    kind = keras.losses.Loss
    call = kind.__call__

    def call_of_global_batch(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        # Keras reduces a loss that the wrapper calls.
        if _wrapped or getattr(loss, "reduction", None) in (None, "none"):
            return call(loss, y_true, y_pred, sample_weight)
        # Kept in the loss itself, since an eager step may create a new one each time.
        own = vars(loss).setdefault("_of_global_batch", {})
        if distribution not in own:
            own[distribution] = _OfGlobalBatch(loss, distribution)
        return own[distribution](y_true, y_pred, sample_weight)

    kind.__call__ = call_of_global_batch
    try:
        yield
    finally:
        kind.__call__ = call


def _check_reduced(loss: keras.losses.Loss) -> None:
    """Refuse a loss that returns one value per sample and so has no mean over a batch."""
    if getattr(loss, "reduction", "mean") in (None, "none"):
        raise HpctrainError(
            "HT-loss-not-reduced",
            "{loss} has reduction={reduction!r}: it gives a value for each sample, not one for the batch",
            'use reduction="sum_over_batch_size", which is the mean over the samples',
            loss=type(loss).__name__,
            reduction=loss.reduction,
        )


class _OfGlobalBatch:
    """A loss whose weighted mean over the ranks is the loss of the global batch.

    It changes nothing outside a step of ``fit``, where the share is unknown.
    """

    def __init__(self, loss: keras.losses.Loss, distribution: Distribution) -> None:
        self._loss = loss
        self._distribution = distribution
        self._gathers = _compares_samples(loss)
        self._values: Any = None
        self.name = loss.name
        _note_values(loss, self._note)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        share = self._distribution.share
        if share is not None:
            _check_reduced(self._loss)
        if share is None or self._distribution.comm.size == 1:
            return self._of_keras(y_true, y_pred, sample_weight)
        if self._gathers:
            return self._of_all(y_true, y_pred, sample_weight)
        self._values = None
        own = self._of_keras(y_true, y_pred, sample_weight)
        if self._values is None:
            return own
        values, mask = self._values, _mask_of(y_pred, self._values)
        share = tf.cast(share, own.dtype)
        if not values.shape.rank:
            return self._of_all(y_true, y_pred, sample_weight)
        if self._loss.reduction == "sum":
            # The ranks' sums are averaged later, so each is scaled up by the number of ranks.
            return own * self._per_share(share)
        return own if mask is None else own * self._part_of(mask, share)

    def _of_keras(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        _wrapped.append(self)
        try:
            return self._loss(y_true, y_pred, sample_weight)
        finally:
            _wrapped.pop()

    def _note(self, values: Any) -> None:
        self._values = tf.convert_to_tensor(values)
        mask = getattr(values, "_keras_mask", None)
        if mask is not None:
            self._values._keras_mask = mask

    def _per_share(self, share: tf.Tensor) -> tf.Tensor:
        """The factor of a rank's part of a sum; 0 for a rank without a sample."""
        return tf.math.divide_no_nan(tf.cast(self._distribution.comm.size, share.dtype), share)

    def _part_of(self, mask: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """The factor of the mean over a rank's unmasked entries: their share of those of all ranks."""
        count = tf.cast(tf.math.count_nonzero(mask), tf.float64) * tf.cast(share > 0, tf.float64)
        part = tf.math.divide_no_nan(count, total(self._distribution.comm, count))
        return tf.cast(part, share.dtype) * self._per_share(share)

    def _of_all(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of all ranks' samples, gathered, as a function of a whole batch cannot be joined from its parts."""
        return self._of_keras(*of_all_ranks(self._distribution, (y_true, y_pred, sample_weight)))


def _compares_samples(loss: keras.losses.Loss) -> bool:
    """Whether the loss may be anything but a sum over samples, divided by their number."""
    kind = next(each for each in type(loss).__mro__ if "call" in vars(each))
    function = getattr(loss, "fn", loss)
    of_keras = all(getattr(each, "__module__", "").startswith("keras.") for each in (kind, function))
    # The value of Circle for one sample compares it with all others of the batch.
    return not of_keras or isinstance(loss, keras.losses.Circle) or loss.reduction == "mean_with_sample_weight"


def _note_values(loss: keras.losses.Loss, note: Callable[[Any], None]) -> None:
    """Let ``note`` see what ``call`` gives before it is reduced."""
    call = loss.call

    @functools.wraps(call)
    def noting(*arguments: Any, **settings: Any) -> Any:
        values = call(*arguments, **settings)
        note(values)
        return values

    loss.call = noting


def _mask_of(y_pred: Any, values: tf.Tensor) -> tf.Tensor | None:
    masks = [mask for mask in (getattr(each, "_keras_mask", None) for each in (y_pred, values)) if mask is not None]
    return functools.reduce(tf.logical_and, masks) if masks else None
