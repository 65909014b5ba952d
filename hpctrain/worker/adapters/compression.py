"""How the gradients of a distributed model travel between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from hpctrain.common.cluster.backends import CAPABILITIES
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.worker.comm.base import Communicator, TopK, Wire

T = TypeVar("T")
Compression = Literal["none", "fp16", "bf16", "top_k"]


def wire_of(compression: str, top_k: float, types: Mapping[str, T], comm: Communicator) -> Wire[T]:
    """The wire format for a compression setting.

    Args:
        top_k: the fraction of the elements that travel with ``compression="top_k"``, between 0 and 1.
        types: the framework's element types by the compression of that name.

    Raises:
        HpctrainError: an unknown compression, a fraction out of range, or a backend that has no ``top_k``.
    """
    if compression not in get_args(Compression):
        raise HpctrainError(
            "HT-compression-unknown",
            "unknown compression {compression!r}",
            nearest(compression, get_args(Compression)),
            compression=compression,
        )
    if compression != "top_k":
        return types.get(compression)
    if not 0 < top_k < 1:
        raise HpctrainError(
            "HT-compression-bad-fraction",
            "top_k={top_k:g} is not between 0 and 1",
            "0.01 sends a hundredth of each sum",
            top_k=top_k,
        )
    if not CAPABILITIES[comm.backend].sends_largest:
        raise HpctrainError(
            "HT-compression-needs-mpi",
            "compression='top_k' needs backend mpi, but {backend} reduces the gradients",
            "choose --backend mpi, or compression 'fp16', 'bf16' or 'none'",
            backend=comm.backend,
        )
    return TopK(fraction=top_k)
