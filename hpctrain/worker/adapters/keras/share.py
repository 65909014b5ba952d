"""The share of a part, and the check that a loop without ``fit`` multiplied its loss by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.ranks import in_step

# Shares drawn outside a graph since the last update and not used: several where a script lists its batches first.
_unused: list[BatchShare] = []
# Whether a share was used since the last one was drawn. Validation uses its own before the next batch is drawn.
_used = False
_updated = False
_GIVEN = "hpctrain.shares"


class BatchShare(tf.experimental.ExtensionType):  # type: ignore[misc]
    """A number that records its use. TensorFlow takes it wherever it takes a tensor."""

    value: tf.Tensor

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        _note_use(self)
        return tf.cast(self.value, dtype, name) if dtype else self.value

    def __mul__(self, other: Any) -> Any:
        return tf.convert_to_tensor(self) * other

    def __rmul__(self, other: Any) -> Any:
        return other * tf.convert_to_tensor(self)

    def __float__(self) -> float:
        return float(tf.convert_to_tensor(self))

    def numpy(self) -> np.floating[Any]:
        """The value of a share that was drawn outside a graph."""
        return tf.convert_to_tensor(self).numpy()  # type: ignore[no-any-return]


def _noting_what_is_drawn(make: Any) -> Any:
    def from_components(spec: Any, components: Any) -> BatchShare:
        share: BatchShare = make(spec, components)
        # TensorFlow also builds placeholders without a tensor, to compare types.
        if isinstance(share.value, tf.Tensor):
            _note_draw(share)
        return share

    return from_components


def _noting_what_is_passed_on(parts: Any) -> Any:
    def to_components(spec: Any, share: BatchShare) -> Any:
        # The graph that the share is passed to checks its use.
        applied_share(share)
        return parts(spec, share)

    return to_components


def applied_share(share: BatchShare) -> tf.Tensor:
    """The value of a share, marked as used, for a step that applies it in another way."""
    _note_use(share)
    if not _is_eager(share):
        given = share.value.graph.get_collection_ref(_GIVEN)
        given[:] = [each for each in given if each[0] is not share.value]
    return share.value


def _note_draw(share: BatchShare) -> None:
    global _used
    if _is_eager(share):
        _used = False
        _unused.append(share)
        del _unused[:-_REMEMBERED]
    else:
        share.value.graph.get_collection_ref(_GIVEN).append([share.value, False])


def _note_use(share: BatchShare) -> None:
    global _used
    if _is_eager(share):
        _used = True
        _unused[:] = [each for each in _unused if each.value is not share.value]
    else:
        for given in share.value.graph.get_collection_ref(_GIVEN):
            given[1] |= given[0] is share.value


# Enough for a list of batches, of which the last one is uneven.
_REMEMBERED = 10_000
BatchShare.Spec._from_components = _noting_what_is_drawn(BatchShare.Spec._from_components)
BatchShare.Spec._to_components = _noting_what_is_passed_on(BatchShare.Spec._to_components)


def check_used() -> None:
    """Refuse an update of a loop that drew an uneven batch and did not use its share; in a graph, as the graph runs."""
    global _updated
    if tf.executing_eagerly():
        _check_drawn()
        return
    given = _given_to(tf.compat.v1.get_default_graph())
    if not given:
        in_step(_check_drawn_in_graph, tf.constant(0.0, tf.float64))
        return
    _updated = True
    if not any(used for _, used in given):
        in_step(_check_value, tf.cast(given[-1][0], tf.float64))


def _given_to(graph: Any) -> list[tuple[tf.Tensor, bool]]:
    """The shares that a graph was given, or the graph around it, and whether each of them was used there."""
    while graph is not None:
        # Filtered because TensorFlow copies the collections of the surrounding graph.
        if given := [(value, used) for value, used in graph.get_collection(_GIVEN) if value.graph is graph]:
            return given
        graph = getattr(graph, "outer_graph", None)
    return []


def _is_eager(share: BatchShare) -> bool:
    return hasattr(share.value, "numpy")


def _check_drawn() -> None:
    global _updated
    # Batches drawn before the last one belong to validation, or to a list that was made before the first update.
    judged = [] if _used else _unused[-1:] if _updated else list(_unused)
    _unused.clear()
    _updated = True
    for share in judged:
        _check_value(share.value.numpy())


def _check_drawn_in_graph(nothing: Any) -> Any:
    _check_drawn()
    return nothing


def _check_value(value: Any) -> Any:
    if value != 1:
        raise HpctrainError(
            "HT-shard-share-not-used",
            "this rank's part of the batch has the share {share:g} from ht.shard, but the loop did not use it",
            "for x, y, sample_weight, share in ht.shard(dataset): multiply the mean loss by share, or give share "
            "to ht.mean_loss(total, count, share=share)",
            share=float(value),
        )
    return value
