"""How the gradients of a distributed model travel between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from hpctrain.common.errors import HpctrainError, nearest

T = TypeVar("T")
Compression = Literal["none", "fp16", "bf16"]


def wire_of(compression: str, types: Mapping[str, T]) -> T | None:
    """The type in which values travel, of the framework's ``types`` by the compression's name; None for their own."""
    if compression not in get_args(Compression):
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown compression {compression!r}",
            nearest(compression, get_args(Compression)),
            compression=compression,
        )
    return types.get(compression)
