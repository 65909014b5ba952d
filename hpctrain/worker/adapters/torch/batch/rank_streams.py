"""Random numbers within a model: each rank draws others, for the rows that it computes.

Outside of models all ranks share one stream, that of one process. A model's numbers follow from the state of that stream
and from the rank. The shared stream moves on by one number if the model has drawn any, so that the next call draws others,
and a script that restores the shared stream, as on resuming, restores all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash


@contextmanager
def rank_stream(rank: int) -> Iterator[None]:
    """A context manager in which PyTorch's generators draw numbers of this data rank's own."""
    shared = [(generator, generator.get_state()) for generator in _generators()]
    begun = []
    for generator, state in shared:
        digest = xxhash.xxh3_64_intdigest(state.numpy().tobytes(), seed=rank)
        generator.manual_seed(digest >> 1)  # seeds are below 2**63
        begun.append(generator.get_state())
    try:
        yield
    finally:
        for (generator, state), begin in zip(shared, begun, strict=True):
            drawn = not torch.equal(generator.get_state(), begin)
            generator.set_state(state)
            if drawn:
                torch.rand(1, generator=generator, device=generator.device)


def _generators() -> list[torch.Generator]:
    """The generators that a model may draw from: the CPU's, and the one of the GPU in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
