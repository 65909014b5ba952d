"""How the rows of an output layer with many classes are cut up, whose loss is computed for some at a time."""

from __future__ import annotations

# The logits of a chunk in the CPU's memory: 134 MB in float32.
_LOGITS = 2**25
# On a GPU each chunk launches kernels, and reads and writes the sum of the weight's gradients, so that eight chunks of
# any size are better than many small ones (https://github.com/linkedin/Liger-Kernel/pull/1414). Rows in a multiple of
# the tile of a matrix product leave no tile half empty, and chunks of one size are compiled once.
_LOGITS_ON_GPU, _MOST_CHUNKS, _TILE = 2**27, 8, 256


def chunk_rows(rows: int, classes: int, *, on_gpu: bool) -> int:
    """How many rows a chunk has; the last one may have fewer."""
    if not on_gpu:
        return -(-rows // max(1, -(-rows * classes // _LOGITS)))
    chunks = min(_MOST_CHUNKS, max(1, -(-rows * classes // _LOGITS_ON_GPU)))
    even = (count for count in range(chunks, _MOST_CHUNKS + 1) if rows % (count * _TILE) == 0)
    return -(-rows // (next(even, chunks) * _TILE)) * _TILE
