"""One rank's part of a global batch, with its share of that batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from hpctrain.common.errors import HpctrainError


class Part(NamedTuple):
    """A part of a dataset of ``(x, y, sample_weight)``."""

    x: Any
    y: Any
    sample_weight: Any
    share: Any


class UnweightedPart(NamedTuple):
    """A part of a dataset of ``(x, y)``. Its weights are ones, and a ``train_step`` does not see them."""

    x: Any
    y: Any
    sample_weight: Any
    share: Any


class InputPart(NamedTuple):
    """A part of a dataset of inputs alone."""

    x: Any
    share: Any


_KINDS = (Part, UnweightedPart, InputPart)


def is_part(data: Any) -> bool:
    """Whether ``data`` is a part or the type of one."""
    return isinstance(data, _KINDS)


def batch_of(part: Any) -> Any:
    """The batch as the user's dataset held it: ``(x, y, sample_weight)``, ``(x, y)`` or ``x``."""
    if isinstance(part, InputPart):
        return part.x
    return tuple(part[:2]) if isinstance(part, UnweightedPart) else tuple(part[:3])


def is_sharded(data: Any) -> bool:
    """Whether ``data`` is a dataset of parts.

    Raises:
        HpctrainError: the parts lie within something else, where neither ``fit`` nor a step finds their share.
    """
    if not isinstance(data, tf.data.Dataset):
        return False
    spec = data.element_spec
    if not is_part(spec) and _holds_part(spec):
        raise HpctrainError(
            "HT-shard-divided-already",
            "the dataset yields {kind} with the parts of ht.shard inside",
            "call ht.shard last: ht.shard(tf.data.Dataset.zip(…))",
            kind=type(spec).__name__,
        )
    return is_part(spec)


def _holds_part(spec: Any) -> bool:
    if isinstance(spec, _KINDS):
        return True
    members = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple | list) else ()
    return any(_holds_part(member) for member in members)
