"""Gradients of tapes: of a distributed model's variables those of the whole batch, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution, distributed_models, distribution_of, share_in_work

# Whether a tape calls its own ``gradient`` for a Jacobian.
_within_jacobian = False
_warned = False


def watch_tapes() -> None:
    """From now on, tapes give the gradients of whole batches for the variables of distributed models.

    They are reduced where they are made and not where they are applied: what a script computes from them is then plain
    arithmetic, the same on every rank.
    """
    tape = tf.GradientTape
    if hasattr(tape.gradient, "watches"):
        return
    tape.gradient = _of_whole_batches(tape.gradient)
    tape.jacobian = _of_own_samples(tape.jacobian)


def _of_whole_batches(gradient: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def watched(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *further: Any, **named: Any) -> Any:
        found = gradient(tape, target, sources, output_gradients, *further, **named)
        if _within_jacobian:
            return found
        variables, gradients = tf.nest.flatten(sources), tf.nest.flatten(found)
        for distribution, places in _by_model(variables):
            if output_gradients is None:
                _check_one_number(target)
            _reduce(distribution, variables, gradients, places)
        return tf.nest.pack_sequence_as(sources, gradients)

    watched.watches = True
    return watched


def _of_own_samples(jacobian: Callable[..., Any]) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def watched(*arguments: Any, **settings: Any) -> Any:
        global _within_jacobian
        _within_jacobian = True
        try:
            return jacobian(*arguments, **settings)
        finally:
            _within_jacobian = False

    return watched


def _by_model(variables: Sequence[Any]) -> Iterator[tuple[Distribution, list[int]]]:
    """The distributed models that variables are part of, each with the places of its own, in one order on all ranks."""
    left: dict[int, list[int]] = {}
    for place, variable in enumerate(variables):
        left.setdefault(id(variable), []).append(place)
    for model in distributed_models():
        distribution = distribution_of(model)
        # A model that ht.distribute refused halfway has no optimizer.
        if distribution is None or distribution.comm.size == 1 or not distribution.optimizers:
            continue
        own = [each for variable in model.trainable_variables for each in (variable, variable._value)]
        places = sorted(place for each in own for place in left.pop(id(each), ()))
        # A trainer that reduces by itself gets what its tape made.
        if places and not distribution.reduction.ahead:
            yield distribution, places
    _warn_of_others([variables[place] for place, *_ in left.values()])


def _reduce(distribution: Distribution, variables: Sequence[Any], gradients: list[Any], places: list[int]) -> None:
    """Replace the gradients in these places by their means over the ranks, each weighted by its rank's share."""
    share = share_in_work()
    present = [place for place in places if gradients[place] is not None]
    means = distribution.reduction.of_tape(
        [variables[place] for place in present], [gradients[place] for place in present], share
    )
    for place, mean in zip(present, means, strict=True):
        gradients[place] = mean


def _check_one_number(target: Any) -> None:
    """Refuse a loss with a value for each sample, which a tape adds up.

    The mean over the ranks of the sums of their samples is not the sum over those of all ranks, and no mean either.
    """
    if any(map(_is_long, tf.nest.flatten(target))):
        raise HpctrainError(
            "HT-not-one-number",
            "tape.gradient was given a loss of several numbers, and differentiates their sum",
            "give it tf.reduce_mean(loss), or for the sum over the samples of all ranks "
            "ht.sum_loss(tf.reduce_sum(loss)); or tf.reduce_sum(loss) where each number is a mean over samples",
        )


def _is_long(target: Any) -> bool:
    shape = getattr(target, "shape", None)
    return bool(isinstance(shape, tf.TensorShape) and shape.rank and shape.num_elements() != 1)


def _warn_of_others(variables: Sequence[Any]) -> None:
    """Say once that a Keras model is trained which no rank shares with the others.

    Variables of a strategy of tf.distribute are shared by its replicas, which it sees to itself.
    """
    global _warned
    if tf.distribute.has_strategy():
        return
    models = distributed_models()
    for variable in variables:
        if not _warned and isinstance(variable, keras.Variable) and variable.trainable:
            _warned = True
            distribution = distribution_of(models[0]) if models else None
            if distribution is not None:
                distribution.comm.say(
                    f"tape.gradient is asked for {variable.path!r}, which is not part of a model that was given to "
                    "ht.distribute: each rank gets the gradient of its own samples"
                )
