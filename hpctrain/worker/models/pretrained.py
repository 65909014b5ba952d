"""The weights that a recipe's training begins with (``model.init_from``), for the networks of either framework."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.checkpoints.weights import open_weights
from hpctrain.common.errors import HpctrainError, abbreviated
from hpctrain.common.recipes.sections import ModelSettings

HEAD = frozenset({"fc.weight", "fc.bias"})
"""The last layer of the residual networks."""

# PyTorch's count of batches, for a plain mean over all of them, which no recipe uses.
COUNT = "num_batches_tracked"
_NAMED = 5


def begin_with(model: ModelSettings, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, NDArray[Any]], str]:
    """The arrays that the network begins with, float32 by name, and a sentence part that says which of them are new.

    What is not among them keeps the values that were drawn: the last layer, if it is to be new.

    Args:
        shapes: of the network's parameters and running statistics.

    Raises:
        HpctrainError: the file or checkpoint cannot be read, is of another network, or holds what is not finite.
    """
    assert model.init_from is not None
    path = Path(model.init_from).expanduser()
    found = open_weights(path)
    wanted = {name: shape for name, shape in shapes.items() if not name.endswith(COUNT)}
    head = HEAD & wanted.keys()
    fitting = all(found.shapes.get(name) == wanted[name] for name in head)
    fresh = head if model.new_head is True or (model.new_head == "auto" and not fitting) else frozenset[str]()
    _require_fit(
        path, {name: shape for name, shape in wanted.items() if name not in fresh}, found.shapes, ignored=fresh
    )
    arrays = {name: _finite(path, name, found.read(name)) for name in wanted if name not in fresh}
    return arrays, _words(path, fresh, wanted, found.shapes)


def _words(
    path: Path, fresh: Collection[str], wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]
) -> str:
    if not fresh:
        return f"begins with the weights of {path}"
    before = f", of {there['fc.bias'][0]:,} there" if there.get("fc.bias") else ""
    return (
        f"begins with the weights of {path}; the last layer is drawn anew for {wanted['fc.bias'][0]:,} classes{before}"
    )


def _require_fit(
    path: Path,
    wanted: Mapping[str, tuple[int, ...]],
    there: Mapping[str, tuple[int, ...]],
    *,
    ignored: Collection[str],
) -> None:
    missing = sorted(wanted.keys() - there.keys())
    unexpected = sorted(name for name in there.keys() - wanted.keys() - set(ignored) if not name.endswith(COUNT))
    misshaped = {
        name: f"{name} {list(there[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in there and there[name] != shape
    }
    faults = [
        f"{kind}: {abbreviated([name[:100] for name in names], _NAMED)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped.values()))
        if names
    ]
    if faults:
        raise HpctrainError(
            "HT-weights-of-other-model",
            "{path} holds weights of another network; {problem}",
            "--set model.name=NAME for the network of the file; model.new_head lets only the last layer differ",
            path=path,
            problem="; ".join(faults),
            missing=missing[:_NAMED],
            unexpected=unexpected[:_NAMED],
            misshaped=[*misshaped][:_NAMED],
        )


def _finite(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    narrow = array.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise HpctrainError(
            "HT-weights-not-usable",
            "{path}: {name} has values that are not finite in float32",
            "begin with other weights",
            path=path,
            name=name,
        )
    return narrow
