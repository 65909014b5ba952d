"""The names of checkpoints and of their files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from pathlib import Path

from hpctrain.common.checkpoints.pieces import Place
from hpctrain.common.files.disk import matching

MANIFEST, SUM = "state.json", "state.sha256"
# Tensors that differ by rank: statistics that its layers computed from its samples, and what its optimizer keeps
# between synchronisations. Everything else is equal on all ranks, and is saved once.
RANDOM, STATISTICS, MOMENTS = "random.", "statistics.", "moments."
OWN = (RANDOM, STATISTICS, MOMENTS)

_NAME = re.compile(r"step-(\d{8,18})")
_HIDDEN = re.compile(r"\.step-\d{8,18}\..+")
DAMAGED = "damaged-"


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """The path of an iteration's checkpoint."""
    return folder / f"step-{iteration:08}"


def hidden_path(path: Path, why: str) -> Path:
    """The path of a checkpoint while it is written or deleted."""
    return path.with_name(f".{path.name}.{why}")


def share_name(rank: int, ranks: int) -> str:
    """The name of the file with a rank's share."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def iterations(folder: Path) -> list[int]:
    """The iterations of all checkpoints in a folder, ascending. Raises HpctrainError, see :func:`matching`."""
    found = (_NAME.fullmatch(path.name) for path in matching(folder, "step-*"))
    return sorted(int(match[1]) for match in found if match)


def hidden(folder: Path) -> list[Path]:
    """Checkpoints that are being written or deleted, or were when a run crashed."""
    return [path for path in folder.glob(".step-*") if _HIDDEN.fullmatch(path.name)]


def damaged_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were found damaged and renamed. Raises HpctrainError, see :func:`matching`."""
    return matching(folder, f"{DAMAGED}step-*")


def shares(sizes: Iterable[tuple[str, int]], ranks: int, loads: Sequence[int] = ()) -> list[list[str]]:
    """Divide tensors over the ranks, the largest first, each to the rank with the least so far.

    Args:
        sizes: names and bytes, the same on all ranks.
        loads: bytes that the ranks write besides; by default none.

    Returns:
        The names of each rank's share; without its smallest tensor no share has more than the least one.
    """
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * ranks)]
    heapify(heap)
    names: list[list[str]] = [[] for _ in range(ranks)]
    for name, size in sorted(sizes, key=lambda each: (-each[1], each[0])):
        load, rank = heap[0]
        names[rank].append(name)
        heapreplace(heap, (load + size, rank))
    return names


def writers(held: Sequence[Mapping[Place, int]]) -> list[list[Place]]:
    """Divide pieces over the ranks that hold them, each to the one of these with the least so far.

    Those that few hold go first, since the others can make up for them; of these the largest.
    """
    holders: dict[Place, list[int]] = {}
    for rank, places in enumerate(held):
        for place in places:
            holders.setdefault(place, []).append(rank)
    loads = [0] * len(held)
    written: list[list[Place]] = [[] for _ in held]
    sizes = {place: held[ranks[0]][place] for place, ranks in holders.items()}
    for place in sorted(holders, key=lambda each: (len(holders[each]), -sizes[each], each)):
        rank = min(holders[place], key=lambda each: (loads[each], each))
        written[rank].append(place)
        loads[rank] += sizes[place]
    return written
