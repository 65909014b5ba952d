"""Steps as ranks record them for ``hpctrain verify``, made from small arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.common.run.step_records import Kept, StepRecord, projection


def kept(kind: str, name: str, values: ArrayLike) -> Kept:
    array = np.asarray(values, dtype=np.float64)
    norm, numbers = projection(array.reshape(-1), lambda part: part)
    return Kept(kind=kind, name=name, shape=array.shape, dtype="float32", norm=norm, values=numbers)


def step(
    gradients: Mapping[str, ArrayLike],
    parameters: Mapping[str, ArrayLike],
    own: Mapping[str, ArrayLike] | None = None,
    samples: Sequence[float] | NDArray[np.float64] = (),
) -> StepRecord:
    """A step of an optimizer; ``own`` are the gradients of the rank before any reduction."""
    kinds = {"gradient": gradients, "parameter": parameters, "own": own or {}}
    tensors = tuple(kept(kind, name, values) for kind, group in kinds.items() for name, values in group.items())
    return StepRecord(samples=np.asarray(samples, dtype=np.float64), kept=tensors)
