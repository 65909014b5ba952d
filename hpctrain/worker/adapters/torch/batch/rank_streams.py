"""Random numbers within a model: each rank draws others, for the rows that it computes.

Outside of models all ranks share one stream, that of one process. A model's numbers follow from the state of that
stream and from the rank. The shared stream moves on by one number if the model has drawn any, so that the next call
draws others, and a script that restores the shared stream, as on resuming, restores all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash


class RankStream:
    """A context manager in which PyTorch's generators draw numbers of this data rank's own. Made anew for each use.

    Args:
        agree: whether any rank has drawn from each generator, for models of which other ranks compute other parts.
    """

    def __init__(self, rank: int, agree: Callable[[list[bool]], list[bool]] = list) -> None:
        self._agree = agree
        self._parted = [(generator, *_part(generator, rank)) for generator in _generators()]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *others: object) -> None:
        drawn = [kind is None and _digest(each.get_state()) != begun for each, _, begun in self._parted]
        for (generator, shared, _), moves in zip(self._parted, drawn if kind else self._agree(drawn), strict=True):
            generator.set_state(shared)
            if moves:
                torch.rand(1, generator=generator, device=generator.device)


# With which state of its own each generator began last, by the seed that it followed from.
_begun: dict[torch.Generator, tuple[int, torch.Tensor, int]] = {}


def _part(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, int]:
    """Let a generator draw a rank's own numbers.

    Returns:
        The state of the shared stream, and the digest of that with which the rank's own begins.
    """
    shared = generator.get_state()
    seed = _digest(shared, rank) >> 1  # seeds are below 2**63
    known = _begun.get(generator)
    if known is None or known[0] != seed:
        generator.manual_seed(seed)
        own = generator.get_state()
        known = _begun[generator] = seed, own, _digest(own)
    else:
        generator.set_state(known[1])
    return shared, known[2]


def _digest(state: torch.Tensor, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(state.numpy().data, seed=seed)


def _generators() -> list[torch.Generator]:
    """The generators that a model may draw from: the CPU's, and the one of the GPU in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
