"""``ht.gather`` and ``ht.mean``: values of all ranks' samples, joined or averaged, for metrics over all samples."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import first_of_each
from hpctrain.worker.comm import Communicator, current

_UNEVEN = "give every rank a value of the same form; a rank without a sample gives None, an empty list or no rows"

# The values of the ranks that have one, each with its rank.
Parts = Sequence[tuple[int, Any]]


def gather(value: Any, *, comm: Communicator | None = None) -> Any:
    """Join the values of all ranks, in rank order, on every rank. Collective.

    For what is each rank's own. Of a :class:`hpctrain.BatchTensor` it returns all rows once; but what a script computes
    from one is the same on all ranks, and would come once for each.

    PyTorch's tensors and NumPy arrays are joined along their first dimension, whose length may differ between ranks;
    they keep their type, their dtype and their device, and carry no gradient. A tensor without dimensions counts as one
    row. TensorFlow's tensors become NumPy arrays. Lists are concatenated. Each member of a dictionary or tuple is
    gathered by itself. Anything else, such as a number or a string, becomes a list with one value per rank. A rank
    without a sample gives None, an empty list or a tensor without rows, and gets the same result as the others.
    Among ranks that compute the same samples (along tp, cp and pp of a mesh), the first one that does not give None
    counts::

        seconds = ht.gather(time.perf_counter() - start)  # a list, on every rank

    Args:
        value: this rank's value, or None where it has no sample.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Raises:
        HpctrainError: ranks gave values of different forms, which is raised on all of them.
        TypeError, AttributeError: a sparse tensor, or one that only stands for another within a ``tf.function``.
    """
    comm = comm or current()
    devices: dict[str, Any] = {}
    everyone = comm.allgather_object(_sent(value, devices, own_rows=True))
    counts = first_of_each(comm, [each is not None for each in everyone])
    return _arrived(_joined([part for part in enumerate(everyone) if counts[part[0]]], "the value"), devices)


def mean(value: Any, weight: Any = 1.0, *, comm: Communicator | None = None) -> Any:
    """The mean of the ranks' values on every rank, weighted if ranks have different numbers of samples. Collective.

    Numbers become a float; PyTorch's tensors and NumPy arrays keep their type, their dtype if it is a floating one (it
    becomes float64 otherwise), and their device, and carry no gradient; each member of a dictionary, list or tuple is
    averaged by itself. The sum is computed in float64, in rank order, and is bit-identical on every rank. The value of
    a rank whose weight is 0 does not count, even if it is NaN or None. Weighted with the number of samples that a rank
    has itself, the result is that of one process over all samples, up to the rounding of each rank's value::

        right = seen = 0
        for x, y in own_part:  # of data that the script divides over the ranks
            right += (model(x).argmax(1) == y).sum().item()
            seen += len(y)
        accuracy = ht.mean(right / max(seen, 1), weight=seen)

    What is computed from the whole batches of :func:`hpctrain.shard` is that mean already, and stays the same. A metric
    that is not a mean over samples (the area under a curve, a median) needs the samples: :func:`gather` them.

    Args:
        weight: the weight of this rank's value, at least 0, such as its number of samples. By default every rank counts
            the same.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Raises:
        HpctrainError: no rank's value counts, or ranks gave values of different forms, which is raised on all of them;
            a weight below 0, or a value that has no mean.
    """
    comm = comm or current()
    devices: dict[str, Any] = {}
    own = float(weight)
    if not 0 <= own < math.inf:
        raise HpctrainError(
            "HT-argument-not-valid",
            "ht.mean: weight={weight:g} is not a number of samples",
            "give a number of at least 0",
            weight=own,
        )
    everyone = comm.allgather_object((own, _sent(value, devices) if own else None))
    counts = first_of_each(comm, [own > 0 for own, _ in everyone])
    parts = [(rank, part) for rank, (_, part) in enumerate(everyone)]
    weights = [own if counts[rank] else 0.0 for rank, (own, _) in enumerate(everyone)]
    if not any(weights):
        raise HpctrainError(
            "HT-argument-not-valid", "ht.mean: every rank's weight is 0, so there is nothing to average"
        )
    return _arrived(_averaged([part for part in parts if weights[part[0]]], weights, "the value"), devices)


@dataclass(frozen=True)
class _Array:
    """An array while it is sent, with the kind of device of the PyTorch tensor that it was; None for other arrays."""

    array: NDArray[Any]
    device: str | None = None


def _sent(value: Any, devices: dict[str, Any], *, own_rows: bool = False) -> Any:
    """Convert a value for sending, and record in ``devices`` where this rank keeps tensors of each kind of device.

    With ``own_rows`` this rank sends its own rows of a batch instead of all of them.
    """
    if isinstance(value, Mapping | list | tuple):
        return _mapped(value, lambda member: _sent(member, devices, own_rows=own_rows))
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        from hpctrain.worker.adapters.torch.tensor_pieces import array_of

        tensor = getattr(value, "local", value) if own_rows else value
        devices.setdefault(tensor.device.type, tensor.device)
        return _Array(array_of(tensor.resolve_conj().resolve_neg()), tensor.device.type)
    if isinstance(value, np.ndarray | np.generic):
        return _Array(np.asarray(value))
    if type(value).__module__.partition(".")[0] in ("tensorflow", "keras") and hasattr(value, "shape"):
        return _Array(np.asarray(value.numpy()))
    return value


def _arrived(value: Any, devices: Mapping[str, Any]) -> Any:
    """The joined values, with PyTorch's tensors on this rank's devices."""
    if isinstance(value, dict | list | tuple):
        return _mapped(value, lambda member: _arrived(member, devices))
    if not isinstance(value, _Array):
        return value
    if value.device is None:
        return value.array
    from hpctrain.worker.adapters.torch.tensor_pieces import tensor_of

    return tensor_of(value.array).to(devices.get(value.device, value.device))


def _mapped(container: Mapping[Any, Any] | Sequence[Any], change: Callable[[Any], Any]) -> Any:
    """A container of the changed members."""
    if isinstance(container, Mapping):
        return {key: change(member) for key, member in container.items()}
    members = map(change, container)
    if hasattr(container, "_fields"):  # a named tuple
        return type(container)(*members)
    return list(members) if isinstance(container, list) else tuple(members)


def _joined(parts: Parts, where: str) -> Any:
    """Join the ranks' values; ``where`` names them in an error."""
    parts = [part for part in parts if part[1] is not None]
    if not parts:
        return None
    first = parts[0][1]
    if isinstance(first, dict | tuple):
        return _by_member(parts, where, _joined)
    _require_one(parts, where, _kind)
    if isinstance(first, list):
        return [item for _, value in parts for item in value]
    if not isinstance(first, _Array):
        return [value for _, value in parts]
    rows = [(rank, np.atleast_1d(value.array)) for rank, value in parts]
    # One without rows adds nothing to others, whatever its type.
    filled = [part for part in rows if len(part[1])] or rows[:1]
    _require_one(filled, where, lambda array: f"{array.dtype.name} with rows of shape {array.shape[1:]}")
    return replace(first, array=np.concatenate([array for _, array in filled]))


def _by_member(parts: Parts, where: str, join: Callable[[Parts, str], Any]) -> Any:
    """Dictionaries, lists or tuples, member by member."""
    first = parts[0][1]
    _require_one(parts, where, _members)
    keys = first if isinstance(first, dict) else range(len(first))
    members = iter([join([(rank, value[key]) for rank, value in parts], f"{where}[{key!r}]") for key in keys])
    return _mapped(first, lambda _: next(members))


def _members(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dictionary of {', '.join(sorted(map(repr, value)))}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else _kind(value)


def _kind(value: Any) -> str:
    """The kind of a value, which decides how it is joined; errors use the same words."""
    if isinstance(value, _Array):
        return "an array" if value.device is None else "a tensor"
    return type(value).__name__ if isinstance(value, list | tuple | dict) else "object"


def _require_one(parts: Parts, where: str, form: Callable[[Any], str]) -> None:
    """Refuse values of different forms."""
    forms = {rank: form(value) for rank, value in parts}
    first = next(iter(forms))
    if other := next((rank for rank in forms if forms[rank] != forms[first]), None):
        raise HpctrainError(
            "HT-gather-not-possible",
            "{where} is {form} on rank {first} and {other_form} on rank {other}, which cannot be combined",
            _UNEVEN,
            where=where,
            form=forms[first],
            first=first,
            other_form=forms[other],
            other=other,
        )


def _averaged(parts: Parts, weights: Sequence[float], where: str) -> Any:
    """The weighted mean of values whose weights are above 0."""
    first = parts[0][1]
    if isinstance(first, dict | tuple | list):
        return _by_member(parts, where, lambda members, inner: _averaged(members, weights, inner))
    _require_one(parts, where, lambda value: f"{_kind(value)} of shape {np.shape(getattr(value, 'array', 0))}")
    total = math.fsum(weights)
    mean = np.sum([weights[rank] * _numbers(value, where) for rank, value in parts], axis=0) / total
    if not isinstance(first, _Array) or (first.device is None and not mean.shape):
        return float(mean)
    floating = first.array.dtype.kind in "fV"
    return replace(first, array=np.asarray(mean).astype(first.array.dtype if floating else np.float64))


def _numbers(value: Any, where: str) -> NDArray[np.float64]:
    array = value.array if isinstance(value, _Array) else np.asarray(value)
    # NumPy gives bfloat16, which other packages add to it, the kind V.
    if array.dtype.kind not in "biufV":
        raise HpctrainError(
            "HT-gather-not-possible",
            "ht.mean: {where} is {value}, which has no mean",
            where=where,
            value=reprlib.repr(array),
        )
    return array.astype(np.float64)
