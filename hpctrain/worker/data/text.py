"""Text as samples: windows of tokens, labelled with the token after each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.shards.text.tokenizer import ByteTokenizer
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import Indices, repetition_of, sample_of

if TYPE_CHECKING:
    from hpctrain.common.shards.text.token_manifest import TokenShards

# One in so many of the bundled documents is for validation.
_VALIDATION = 20
# The third word of the cuts' random seed, whose first two are those of a pass's order.
_CUT_STREAM = 1


class TokensInMemory:
    """Tokens in an array."""

    def __init__(self, tokens: NDArray[np.uint16]) -> None:
        self._tokens = tokens

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256(self._tokens.astype("<u2").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, begin: int, count: int) -> NDArray[np.uint16]:
        """A view of the tokens."""
        return self._tokens[begin : begin + count]


class Windows:
    """A :class:`hpctrain.worker.data.samples.SampleSource` of windows without overlap.

    In training each pass, whose number an index carries as its repetition, draws the offset of its windows, so that
    every token comes at every place of a window. At the ends, less than two windows of a pass remain unused.

    Args:
        context: the number of tokens in a window.
        seed: the recipe's; None for windows with the same offset in each pass.
    """

    def __init__(self, tokens: TokenShards | TokensInMemory, context: int, seed: int | None = None) -> None:
        self._tokens = tokens
        self._context = context
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokens."""
        return self._tokens.fingerprint

    def __len__(self) -> int:
        # The last label is one token further, and an offset is less than a window.
        unused = 1 if self._seed is None else self._context
        return max(0, (len(self._tokens) - unused) // self._context)

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The windows of each piece."""
        for piece in pieces:
            passes, place = np.unique(repetition_of(piece), return_inverse=True)
            begins = sample_of(piece) * self._context + np.array([self._cut(number) for number in passes])[place]
            rows = np.stack([self._tokens.read(begin, self._context + 1) for begin in begins.tolist()]).astype(np.int64)
            yield Samples(images=rows[:, :-1], labels=rows[:, 1:])

    def _cut(self, number: int) -> int:
        if self._seed is None:
            return 0
        return int(np.random.default_rng((self._seed, number, _CUT_STREAM)).integers(self._context))

    def close(self) -> None:
        """Do nothing: there are no workers."""


def bundled_tokens() -> tuple[TokensInMemory, TokensInMemory]:
    """The bytes of the language reference that ships with Python for its ``help()``: for training, for validation."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    held_out = documents[::_VALIDATION]
    rest = [text for number, text in enumerate(documents) if number % _VALIDATION]
    return _in_memory(rest), _in_memory(held_out)


def _in_memory(documents: Sequence[str]) -> TokensInMemory:
    return TokensInMemory(np.concatenate([*ByteTokenizer().tokens(documents)]))
