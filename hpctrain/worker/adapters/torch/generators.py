"""Random generators, those of the process and those that objects hold: found, restored, and replaced for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

T = TypeVar("T")
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
        for each in _held_by(value):
            yield from generators_in(each, seen, depth - 1)


def _held_by(value: Any) -> list[Any]:
    """The members and attributes of an object, with its methods, and what a function refers to outside of itself."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return cells + [value.__globals__[name] for name in names if name in value.__globals__]
    few = isinstance(value, list | tuple | dict) and len(value) <= _FEW
    held = list(value.values() if isinstance(value, dict) else value) if few else []
    if not isinstance(value, type | ModuleType):
        methods = [each for each in vars(type(value)).values() if isinstance(each, FunctionType)]
        held += [*getattr(value, "__dict__", {}).values(), *methods]
    return held


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
        _seed(self.seed, self._held)


class SampleNumbers:
    """Random numbers of a data set and a ``collate_fn``, which depend on a seed, the epoch, and the sample or batch.

    They are equal for a sample wherever it is fetched: on any rank, and in any worker process.

    Args:
        salt: what all of them depend on.
        data: the data set, whose generators and those of the process are seeded.
    """

    def __init__(self, salt: int, data: Any, collate: Any) -> None:
        self._salt = salt
        self._samples_draw = not is_plain(data)
        self._drawing = [each for each in (data, collate) if not is_plain(each)]
        self._held: list[Generator] | None = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context manager that restores all generators at its end."""
        with kept(self._generators()) if self._drawing else contextlib.nullcontext():
            yield

    def of_sample(self, epoch: int, key: int) -> None:
        """Seed the generators for a sample of an epoch."""
        if self._samples_draw:
            self._seed(epoch, key, 0)

    def of_batch(self, epoch: int, number: int) -> None:
        """Seed the generators for a whole batch of an epoch."""
        self._seed(epoch, number, 1)

    def drawn_by(self, action: Callable[[], T]) -> tuple[T, bool]:
        """The result of an action, and whether it has drawn random numbers, which is then undone."""
        if not self._drawing:
            return action(), False
        held = self._generators()
        before, states = _process_state(), [_state(each) for each in held]
        result = action()
        if _equal(before, _process_state()) and all(map(_equal, states, map(_state, held))):
            return result, False
        _set_process_state(before)
        for each, state in zip(held, states, strict=True):
            _restore(each, state)
        return result, True

    def _generators(self) -> list[Generator]:
        if self._held is None:  # searched in the process that draws
            self._held = list(generators_in(self._drawing, {}))
        return self._held

    def _seed(self, *keys: int) -> None:
        if self._drawing:
            _seed(_hash(repr((self._salt, *keys)).encode()), self._generators())


def is_plain(data: Any) -> bool:
    """Whether a data set reads its samples from memory, or a ``collate_fn`` is PyTorch's: neither draws numbers."""
    if isinstance(data, ConcatDataset):
        return all(map(is_plain, data.datasets))
    plain = type(data) in (TensorDataset, list, tuple) or data is default_collate
    return is_plain(data.dataset) if isinstance(data, Subset) else plain


def _seed(seed: int, held: Iterable[Generator]) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for number, each in enumerate(held):
        own = _hash(seed.to_bytes(8, "big"), bytes([number % 256]))
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


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, np.ndarray):
        return np.array_equal(state, other)
    if isinstance(state, dict):
        return all(_equal(each, other[name]) for name, each in state.items())
    if isinstance(state, tuple) and any(isinstance(each, np.ndarray | torch.Tensor) for each in state):
        return all(map(_equal, state, other))
    return bool(state == other)


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor | np.ndarray):
        return np.asarray(state).tobytes()
    if isinstance(state, dict):
        return b"".join(f"{name}".encode() + _bytes(each) for name, each in state.items())
    if isinstance(state, tuple) and not all(isinstance(each, int) for each in state):
        return b"".join(map(_bytes, state))
    return repr(state).encode()


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
