"""Random generators, those of the process and those that objects hold: found, restored, and replaced for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

Generator = random.Random | np.random.RandomState | np.random.Generator | torch.Generator

# The search for random generators in an object: its depth, the longest list, and the most objects.
_DEPTH, _FEW, _HELD = 5, 100, 10_000


def generators_in(value: Any, seen: dict[int, Any], depth: int = _DEPTH) -> Iterator[Generator]:
    """The generators of random numbers in an object, and in what it holds, but for objects that were ``seen``."""
    if id(value) in seen or len(seen) > _HELD:
        return
    seen[id(value)] = value
    if isinstance(value, Generator):
        yield value
    elif depth:
        few = isinstance(value, list | tuple | dict) and len(value) <= _FEW
        held = list(value.values() if isinstance(value, dict) else value) if few else []
        if not isinstance(value, type | ModuleType):
            held += getattr(value, "__dict__", {}).values()
        for each in held:
            yield from generators_in(each, seen, depth - 1)


@contextlib.contextmanager
def kept(generators: Iterable[Generator] = ()) -> Iterator[None]:
    """A context manager that restores the process's generators, and these, at its end."""
    generators = list(generators)
    before, states = _process_state(), [_state(each) for each in generators]
    try:
        yield
    finally:
        _set_process_state(before)
        for each, state in zip(generators, states, strict=True):
            _restore(each, state)


class OwnRandomNumbers:
    """Random numbers that depend on these keys alone, for code that draws from the process's generators.

    Args:
        keys: what they depend on.
        held: further generators, which such code holds. Their states when this is made are keys too, so that those that
            a script seeded differently draw differently.

    Attributes:
        seed: what all random numbers depend on.
    """

    def __init__(self, *keys: int, held: Iterable[Generator] = ()) -> None:
        self._held = list(held)
        states = [_state(each) for each in self._held]
        self._states: Any = None
        self.seed = _hash(repr(keys).encode(), *(_bytes(state) for state in states))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context manager in which all these generators go on where they were in the last one."""
        with kept(self._held):
            if self._states is None:
                self._begin()
            else:
                before, held = self._states
                _set_process_state(before)
                for each, state in zip(self._held, held, strict=True):
                    _restore(each, state)
            try:
                yield
            finally:
                self._states = _process_state(), [_state(each) for each in self._held]

    def _begin(self) -> None:
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.default_generator.manual_seed(self.seed)
        for number, each in enumerate(self._held):
            own = _hash(self.seed.to_bytes(8, "big"), bytes([number % 256]))
            if isinstance(each, np.random.Generator):
                each.bit_generator.state = type(each.bit_generator)(own).state
            elif isinstance(each, torch.Generator):
                each.manual_seed(own)
            else:
                each.seed(own % 2**32)


def _hash(*parts: bytes) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() >> 1  # PyTorch takes seeds below 2**63 only


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor | np.ndarray):
        return np.asarray(state).tobytes()
    if isinstance(state, dict):
        return b"".join(f"{name}".encode() + _bytes(each) for name, each in state.items())
    return b"".join(map(_bytes, state)) if isinstance(state, tuple) else repr(state).encode()


def _process_state() -> Any:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_process_state(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


def _state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
