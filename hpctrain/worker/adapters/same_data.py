"""Proves that all ranks were given the same data and models: what ``ht.shard`` divides has to lie whole on each.

Ranks compare summaries of a few samples, not all their bytes: two hosts may decode an image to slightly different
numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.base import Communicator

WHOLE = (
    "give ht.shard the whole data set on every rank: with the same files on every host, in the same order (sorted), "
    "and with random choices that are seeded alike. A rank that has data of its own draws them from a plain loader, "
    "without ht.shard"
)
# How many samples of a data set are compared, and of the first batch of a stream.
_FEW_SAMPLES = 4
# A longer text is described by its hash.
_SHORT = 64
_TOLERANCE = 2e-3


@dataclasses.dataclass(frozen=True)
class LeafSummary:
    """A short description of one leaf of a sample, to compare between ranks."""

    # What must be equal: the type and the shape, and the value unless it is given by numbers.
    exact: str
    # What may differ by rounding: means over an array.
    numbers: tuple[float, ...] = ()
    tolerance: float = 0.0

    def differs(self, other: LeafSummary) -> bool:
        """Whether these are two different values."""
        if RANDOM in (self, other):
            return False
        if self.exact != other.exact or len(self.numbers) != len(other.numbers):
            return True
        tolerance = max(self.tolerance, other.tolerance)
        return any(abs(one - two) > tolerance for one, two in zip(self.numbers, other.numbers, strict=True))

    def __str__(self) -> str:
        means = ", ".join(f"{number:g}" for number in self.numbers)
        return f"{self.exact} of means {means}" if means else self.exact


RANDOM = LeafSummary("random")
"""Of a leaf that is another each time that it is fetched."""

# The leaves by their place in the sample; None for a sample that cannot be fetched, which the training will notice.
Sample = Mapping[str, LeafSummary] | None


def summarise(sample: Any) -> dict[str, LeafSummary]:
    """Summaries of a sample's leaves: numbers, texts and arrays in containers."""
    return {name: _summarise_leaf(leaf) for name, leaf in leaves(sample)}


def summaries_of_few(samples: Sequence[Any]) -> dict[int, Sample]:
    """Summaries of some of the samples, by their indices."""
    return {index: summarise(samples[index]) for index in sample_indices(len(samples))}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is in the containers of a sample, with its place in them."""
    if isinstance(value, Mapping):
        members: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    else:
        yield name, value
        return
    for key, member in members:
        yield from leaves(member, f"{name}[{key!r}]")


def _summarise_leaf(leaf: Any) -> LeafSummary:
    kind = type(leaf).__name__
    if leaf is None or isinstance(leaf, bool | int | np.bool_ | np.integer):
        return LeafSummary(f"{leaf}")
    if isinstance(leaf, str | bytes):
        # Only the end of a path counts: a file may lie in another folder on each host.
        last = leaf.split("/")[-1] if isinstance(leaf, str) else leaf.split(b"/")[-1]
        shown = repr(last) if len(last) < _SHORT else xxhash.xxh3_64_hexdigest(last)  # type: ignore[arg-type]
        return LeafSummary(f"{kind} {shown}")
    array = array_of(leaf)
    return LeafSummary(kind) if array is None else _summarise_array(array)


def array_of(leaf: Any) -> Any:
    """A tensor, an array, a number or an image as an array; None for anything else."""
    if not (isinstance(leaf, float) or hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")):
        return None
    try:
        if hasattr(leaf, "detach"):
            leaf = leaf.detach().cpu()
            # NumPy has no bfloat16.
            leaf = leaf.double() if leaf.is_floating_point() else leaf
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError):  # a sparse one
        return None
    return array if array.dtype.kind in "biufcSU" else None


def _summarise_array(array: np.ndarray[Any, Any]) -> LeafSummary:
    what = f"{array.dtype.name} {array.shape}" if array.shape else array.dtype.name
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    flat = np.ascontiguousarray(array).ravel()
    if array.dtype.kind in "SU" or (array.dtype.kind in "biu" and array.dtype != np.uint8):
        shown = flat.tolist() if flat.size <= 4 else f"with hash {xxhash.xxh3_64_hexdigest(flat.tobytes())}"
        return LeafSummary(f"{what} {shown}")
    numbers = np.nan_to_num(flat.astype(np.float64), posinf=1e300, neginf=-1e300)
    if not flat.size:
        return LeafSummary(what)
    # Means with weights of at most 1, over which two different arrays have different ones.
    places = np.arange(flat.size)
    weights = (1.0, places / flat.size, np.cos(places), np.cos(np.sqrt(2) * places))
    means = [float((numbers * weight).mean()) for weight in weights]
    # Of large numbers that are close to each other, as temperatures, the difference counts.
    spread = float(np.abs(numbers - means[0]).mean() + 1e-3 * np.abs(numbers).mean())
    return LeafSummary(what, tuple(means), _TOLERANCE * spread)


def sample_indices(samples: int) -> list[int]:
    """Indices spread over a data set of ``samples``, the same on every rank."""
    golden = (np.sqrt(5) - 1) / 2
    few = range(min(samples, _FEW_SAMPLES))
    return list(dict.fromkeys(int((0.5 + golden * number) % 1 * samples) for number in few))


def compare(
    comm: Communicator, facts: Mapping[str, tuple[str, str]], summaries: Mapping[Any, Sample] | None = None
) -> None:
    """Refuse data that differ between ranks, of which ``summaries`` has some samples by their indices. Collective.

    ``facts`` are what must be equal, by name: the value as text, and what to do if it differs.
    """
    everyone = comm.allgather_object((dict(facts), dict(summaries or {})))
    for rank, (others, _) in enumerate(everyone):
        for name, (_, hint) in (everyone[0][0] | others).items():
            (value, _), (other, _) = (given.get(name, ("missing", "")) for given in (everyone[0][0], others))
            if other != value:
                raise _refusal(name, value, rank, other, hint)
    compare_samples([samples for _, samples in everyone])


def compare_models(comm: Communicator, kind: str, forms: Sequence[str]) -> None:
    """Refuse models whose parts differ from rank 0's: ranks would wait for each other's tensors. Collective."""
    everyone = comm.allgather_object(list(forms))
    for rank, theirs in enumerate(everyone):
        pairs = itertools.zip_longest(everyone[0], theirs, fillvalue="nothing")
        for position, (first, here) in enumerate(pairs):
            if here != first:
                raise HpctrainError(
                    "HT-ranks-different-models",
                    "{kind} {position} is {first} on rank 0 and {here} on rank {rank}",
                    "build the same model, optimizer and metrics on every rank",
                    kind=kind,
                    position=position,
                    first=first,
                    here=here,
                    rank=rank,
                )


def compare_samples(everyone: Sequence[Mapping[Any, Sample]]) -> None:
    """Refuse samples of the same index that differ between ranks."""
    for index, first in everyone[0].items():
        for rank, samples in enumerate(everyone):
            sample = samples.get(index)
            if first is None or sample is None:
                continue
            for name in [*first, *(name for name in sample if name not in first)]:
                one, two = first.get(name, _MISSING), sample.get(name, _MISSING)
                if one.differs(two):
                    where = f"sample {index}{f' at {name}' if name else ''}"
                    raise _refusal(where, str(one), rank, str(two), WHOLE)


def _refusal(name: str, value: str, rank: int, other: str, hint: str) -> HpctrainError:
    return HpctrainError(
        "HT-shard-different-data",
        "the ranks gave ht.shard different data, {where}: {first} on rank 0, {other} on rank {rank}",
        hint,
        where=name,
        first=value,
        other=other,
        rank=rank,
    )


_MISSING = LeafSummary("missing")
