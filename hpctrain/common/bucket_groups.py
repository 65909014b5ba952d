"""Which gradients share one reduction: a rule over sizes alone, for the ranks and for what predicts them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

BUCKET_BYTES = 25e6
"""By default, as in PyTorch's DistributedDataParallel."""

# Each rank of a host sends its slice in a part for each host. A part of this size is sixteen messages over TCP, which
# take little time to start.
_PART_BYTES = 1e6
_SMALLEST_BYTES = 4e6

# From this size on, copying a gradient into a bucket costs more than a reduction of its own.
_IN_PLACE_BYTES = 4_000_000


def mpi_bucket_bytes(*, hosts: int, local: int, rdma: bool) -> float:
    """The default of hpctrain's own engine, ``mpi``, on hosts with so many ranks each.

    Buckets are smaller where links are slow, between hosts without RDMA, so that the first gradients leave while most
    of the backward pass is still to come. Measured with 2 hosts of 2 ranks and with 4 of one, on links of 1 Gbit/s
    (benchmarks/notes/allreduce.md).
    """
    if hosts == 1 or rdma:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(_SMALLEST_BYTES, _PART_BYTES * hosts * local))


@dataclass(frozen=True, kw_only=True)
class BucketMember:
    """A parameter, as far as the rule needs to know it.

    Attributes:
        kind: gradients of one kind (type and device) share buckets.
        dense: whether its elements fill their memory without gaps.
    """

    nbytes: int
    kind: Hashable = None
    dense: bool = True


@dataclass(frozen=True, kw_only=True)
class BucketGroup:
    """Parameters whose gradients are reduced together.

    Attributes:
        members: their numbers in the order of registration, in the order in which they lie in the bucket.
        in_place: whether it is one gradient, reduced where autograd put it.
        flags: how many elements travel behind the gradients: one a parameter, with the last bucket.
    """

    members: tuple[int, ...]
    in_place: bool
    flags: int


def group(
    parameters: Sequence[BucketMember], bucket_bytes: float, *, in_place: bool, compressed: bool
) -> list[BucketGroup]:
    """Buckets in the order in which a backward pass is likely to fill them: the reverse of registration.

    Args:
        in_place: the engine reduces a buffer that it did not allocate as fast as one that it did.
        compressed: gradients travel in another form than they have in memory.
    """
    large = min(bucket_bytes, _IN_PLACE_BYTES) if in_place and not compressed else float("inf")
    groups = _together(parameters, bucket_bytes, large)
    found = []
    for index, members in enumerate(groups):
        first, last = parameters[members[0]], index == len(groups) - 1
        alone = first.nbytes >= large and first.dense and not last
        found.append(BucketGroup(members=tuple(members), in_place=alone, flags=len(parameters) if last else 0))
    return found


def _together(parameters: Sequence[BucketMember], bucket_bytes: float, large: float) -> list[list[int]]:
    """Parameters that go together: of one kind, up to the size of a bucket, large ones by themselves."""
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    groups: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if parameter.nbytes >= large:
            groups.append([index])
            continue
        filling.setdefault(parameter.kind, []).append(index)
        filled[parameter.kind] = filled.get(parameter.kind, 0) + parameter.nbytes
        if filled[parameter.kind] >= bucket_bytes:
            groups.append(filling.pop(parameter.kind))
            del filled[parameter.kind]
    return groups + list(filling.values())
