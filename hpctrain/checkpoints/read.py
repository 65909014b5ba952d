"""Reads the state in a checkpoint for the current number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoints.layout import OWN, STATISTICS
from hpctrain.checkpoints.manifest import CheckpointManifest, read_manifest
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    State = dict[str, NDArray[Any]]

# After the name of what is a rank's own: whose it is.
_WHOSE = re.compile(r"(.+)\.(\d{1,9})")


def read_state(path: Path, rank: int, ranks: int) -> tuple[CheckpointManifest, State]:
    """The state from which a rank continues.

    Other ranks than those that were have the mean of their statistics, which is what batch normalisation is validated
    with, and one rank's random state.

    Args:
        path: of a checkpoint that is whole (see :func:`hpctrain.checkpoints.find.verify`).
        rank, ranks: which one, of how many there are now.

    Returns:
        The manifest; and all tensors by name, where what is a rank's own has no number any more.

    Raises:
        HpctrainError: it is not there, or damaged.
    """
    manifest = read_manifest(path)
    before = manifest.progress.ranks
    state: State = {}
    everyones: dict[str, dict[int, NDArray[Any]]] = {}
    for name, value in _tensors(path, manifest):
        match = _WHOSE.fullmatch(name) if name.startswith(OWN) else None
        if match is None:
            state[name] = value
        elif ranks != before and name.startswith(STATISTICS):
            everyones.setdefault(match[1], {})[int(match[2])] = value
        elif int(match[2]) == rank % before:
            state[match[1]] = value
    try:
        means = {name: _mean(values) for name, values in everyones.items()}
    except (TypeError, ValueError) as error:
        raise HpctrainError(f"{path}: the ranks' statistics are not alike: {error}", exit_code=1) from error
    return manifest, state | means


def _tensors(path: Path, manifest: CheckpointManifest) -> Iterator[tuple[str, NDArray[Any]]]:
    from safetensors import SafetensorError, safe_open

    for name in manifest.files:
        try:
            with safe_open(path / name, framework="np") as file:
                for key in file.keys():  # noqa: SIM118
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise HpctrainError(
                f"cannot read {path / name}: {error}", "--resume takes the checkpoint before", exit_code=1
            ) from error


def _mean(values: dict[int, NDArray[Any]]) -> NDArray[Any]:
    """The mean of the ranks' values, added up in rank order; for counters the first value."""
    import numpy as np

    ordered = [values[rank] for rank in sorted(values)]
    # The kind of bfloat16 is "V".
    if ordered[0].dtype.kind in "biu":
        return ordered[0]
    mean: NDArray[Any] = np.mean(np.stack(ordered), axis=0, dtype=np.float64).astype(ordered[0].dtype)
    return mean
