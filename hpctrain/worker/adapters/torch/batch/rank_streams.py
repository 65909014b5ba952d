"""Random numbers within a model: each rank draws others, for the rows that it computes.

Outside of models all ranks share one stream, that of one process. A model's numbers follow from the state of that
stream and from the rank. The shared stream moves on by one number if the model has drawn any, so that the next call
draws others, and a script that restores the shared stream, as on resuming, restores all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import xxhash


@contextmanager
def rank_stream(rank: int, agree: Callable[[list[bool]], list[bool]] = list) -> Iterator[None]:
    """A context manager in which PyTorch's generators draw numbers of this data rank's own.

    Args:
        agree: whether any rank has drawn from each generator, for models of which other ranks compute other parts.
    """
    shared = [(generator, generator.get_state()) for generator in _generators()]
    begun = []
    for generator, state in shared:
        digest = xxhash.xxh3_64_intdigest(state.numpy().tobytes(), seed=rank)
        generator.manual_seed(digest >> 1)  # seeds are below 2**63
        begun.append(generator.get_state())
    drawn = [False] * len(shared)
    try:
        yield
        ends = [generator.get_state() for generator, _ in shared]
        drawn = agree([not torch.equal(end, begin) for end, begin in zip(ends, begun, strict=True)])
    finally:
        for (generator, state), moves in zip(shared, drawn, strict=True):
            generator.set_state(state)
            if moves:
                torch.rand(1, generator=generator, device=generator.device)


def _generators() -> list[torch.Generator]:
    """The generators that a model may draw from: the CPU's, and the one of the GPU in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
