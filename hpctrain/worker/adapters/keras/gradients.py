"""Gradients on their way from a tape to an optimizer: weighted by the share, and clipped by hand as on one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution, distributed_models, distribution_of


class _Origin(NamedTuple):
    """Where a gradient comes from.

    Attributes:
        place: of its variable in the model.
        added_up: whether the loss was several numbers.
    """

    distribution: Distribution
    place: int
    added_up: bool = False


def watch_tapes() -> None:
    """From now on, weight the gradients that tapes compute, and clip by hand what the mean over the ranks will be.

    A gradient is weighted where it is made and not where it is applied, because a script may add up those of several
    batches, which have different shares.
    """
    tape = tf.GradientTape
    if hasattr(tape.gradient, "watches"):
        return
    tape.gradient = _watched(tape.gradient)
    for module, name, made in (
        (tf, "clip_by_global_norm", _by_global_norm),
        (tf, "clip_by_norm", _by_norm),
        (tf, "clip_by_value", _by_value),
        (tf.linalg, "global_norm", _global_norm),
        (keras.ops, "clip", _by_value),
    ):
        setattr(module, name, made(getattr(module, name)))


def _watched(gradient: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def watched(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *further: Any, **named: Any) -> Any:
        found = gradient(tape, target, sources, output_gradients, *further, **named)
        # What another tape differentiates once more is not what will be applied.
        if could_possibly_record():
            return found
        origins = _origins()
        added_up = output_gradients is None and any(map(_is_long, tf.nest.flatten(target)))
        marked = [
            each if each is None or id(source) not in origins else _marked(each, origins[id(source)], added_up)
            for source, each in zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, marked)

    watched.watches = True
    return watched


def _origins() -> dict[int, _Origin]:
    """The origins of gradients that an optimizer will reduce, by the ids of their variables."""
    return {
        id(each): _Origin(distribution, place)
        for model in distributed_models()
        # A model that ht.distribute refused halfway has no optimizer.
        if (distribution := distribution_of(model)) and distribution.comm.size > 1 and distribution.optimizers
        if not distribution.reduction.ahead
        for place, variable in enumerate(model.trainable_variables)
        for each in (variable, variable._value)
    }


def _is_long(target: Any) -> bool:
    shape = getattr(target, "shape", None)
    return bool(isinstance(shape, tf.TensorShape) and shape.rank and shape.num_elements() != 1)


def _marked(gradient: Any, origin: _Origin, added_up: bool) -> Any:
    """The gradient, within a step of ``fit`` times the share of its batch, with its origin."""
    distribution = origin.distribution
    if distribution.share is not None:
        gradient = tf.math.scalar_mul(tf.cast(distribution.share, gradient.dtype), gradient)
        distribution.weighted = True
    gradient._origin = origin._replace(added_up=added_up)
    return gradient


def _origin_of(gradient: Any) -> _Origin | None:
    origin: _Origin | None = getattr(gradient, "_origin", None)
    return origin


def _part_as(made: Any, gradient: Any) -> Any:
    """What was made of a gradient and is again this rank's part of a mean, so that it can be clipped once more."""
    if origin := _origin_of(gradient):
        made._origin = origin
    return made


def check_added_up(gradients: Iterable[Any]) -> None:
    """Refuse the gradients of a loss with a value for each sample, which a tape adds up.

    The mean over the ranks of the sums of their samples is not the sum over those of all ranks, and no mean either.
    """
    if any(origin.added_up for each in gradients if (origin := _origin_of(each))):
        raise HpctrainError(
            "HT-loss-not-one-number",
            "tape.gradient was given a loss of several numbers, and differentiates their sum",
            "give it tf.reduce_mean(loss), or for the sum over the samples of all ranks "
            "ht.sum_loss(tf.reduce_sum(loss)); or tf.reduce_sum(loss) where each number is a mean over samples",
        )


def _means(gradients: Sequence[Any], use: str) -> list[Any]:
    """The means over the ranks of gradients that will be reduced; other tensors as they are."""
    origins = [_origin_of(each) for each in gradients]
    first = next((origin for origin in origins if origin), None)
    if first is None:
        return list(gradients)
    check_added_up(gradients)
    places = [origin and origin.place for origin in origins]
    name = f"{use}.{zlib.crc32(repr(places).encode()):x}"
    means = iter(first.distribution.reduction.mean_by_hand([each for each in gradients if each is not None], name))
    return [each if each is None else next(means) for each in gradients]


def _global_norm(norm: Callable[..., Any]) -> Any:
    def global_norm(t_list: Any, name: str | None = None) -> Any:
        return norm(_means(t_list, "global_norm"), name=name)

    return tf.autograph.experimental.do_not_convert(global_norm)


def _by_global_norm(clip: Callable[..., Any]) -> Any:
    def clip_by_global_norm(t_list: Any, clip_norm: Any, use_norm: Any = None, name: str | None = None) -> Any:
        # This rank's part times a factor that is the same on all ranks: the update takes the mean.
        clipped, norm = clip(t_list, clip_norm, tf.linalg.global_norm(t_list) if use_norm is None else use_norm, name)
        return [_part_as(each, given) for each, given in zip(clipped, t_list, strict=True)], norm

    return tf.autograph.experimental.do_not_convert(clip_by_global_norm)


def _by_norm(clip: Callable[..., Any]) -> Any:
    def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
        if _origin_of(t) and isinstance(t, tf.IndexedSlices):
            return tf.clip_by_global_norm([t], clip_norm)[0][0]
        return clip(_means([t], "norm")[0], clip_norm, axes, name)

    return tf.autograph.experimental.do_not_convert(clip_by_norm)


def _by_value(clip: Callable[..., Any]) -> Any:
    def clip_by_value(*given: Any, **settings: Any) -> Any:
        # TensorFlow and Keras call it differently.
        value, *limits = given or [settings.pop("t" if "t" in settings else "x")]
        origin = _origin_of(value)
        if origin and isinstance(value, tf.IndexedSlices):
            # Each row is that of one sample, and in the mean over the ranks still one of its own.
            ranks = tf.cast(origin.distribution.comm.size, value.dtype)
            part = tf.math.scalar_mul(ranks, clip(tf.math.scalar_mul(1 / ranks, value), *limits, **settings))
            return _part_as(part, value)
        return clip(_means([value], "value")[0], *limits, **settings)

    return tf.autograph.experimental.do_not_convert(clip_by_value)
