"""Random generators, those of the process and those that objects hold: found, restored, and replaced for a while."""

from __future__ import annotations

import contextlib
import functools
import pickle  # to compare states, never to load them
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
        for member in _held_by(value):
            yield from generators_in(member, seen, depth - 1)


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
        methods = [method for method in vars(type(value)).values() if isinstance(method, FunctionType)]
        held += [*getattr(value, "__dict__", {}).values(), *methods]
    return held


def device_generators() -> list[torch.Generator]:
    """PyTorch's own generators: the CPU's, and that of the GPU in use, which a forked process must not touch."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


class Generators:
    """The process's generators, behind the functions of ``random``, ``numpy.random`` and ``torch``, and ``held``."""

    def __init__(self, held: Iterable[Generator] = ()) -> None:
        self._held: list[Generator] = [random._inst, np.random.mtrand._rand, torch.default_generator, *held]

    @property
    def _all(self) -> list[Generator]:
        # A GPU's may come later, and is missing in worker processes: last, the seeds of the others are the same there.
        return [*self._held, *device_generators()[1:]]

    def states(self) -> list[Any]:
        """The state of each of them."""
        return list(map(_state, self._all))

    def restore(self, states: list[Any]) -> None:
        """Put each into its state of :meth:`states`."""
        for generator, state in zip(self._all, states, strict=False):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, torch.Generator):
                generator.set_state(torch.from_numpy(state))
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Seed each by a seed of its own."""
        for number, generator in enumerate(self._all):
            own = _hash(repr((seed, number)).encode())
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(own).state
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            else:
                generator.seed(own % 2**32 if isinstance(generator, np.random.RandomState) else own)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context manager that restores them at its end."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)


class OwnRandomNumbers:
    """Random numbers that depend on these keys alone, for code that draws from the process's generators.

    Args:
        held: further generators, which such code holds. Their states when this is made are keys too, so that those that
            a script seeded differently draw differently.
    """

    def __init__(self, *keys: int, held: Iterable[Generator] = ()) -> None:
        held = list(held)
        self._generators = Generators(held)
        self._states: list[Any] | None = None
        self.seed = _hash(pickle.dumps((keys, list(map(_state, held)))))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context manager in which all these generators go on where they were in the last one."""
        with self._generators.kept():
            if self._states is None:
                self._generators.seed(self.seed)
            else:
                self._generators.restore(self._states)
            try:
                yield
            finally:
                self._states = self._generators.states()


class SampleNumbers:
    """Random numbers of a data set and a ``collate_fn``, which depend on a seed, the epoch, and the sample or batch.

    They are equal for a sample wherever it is fetched: on any rank, and in any worker process. The generators of the
    process are seeded, and those that the data set and the ``collate_fn`` hold.
    """

    def __init__(self, salt: int, data: Any, collate: Any) -> None:
        self._salt = salt
        self._samples_draw = not is_plain(data)
        self._drawing = [source for source in (data, collate) if not is_plain(source)]

    @functools.cached_property
    def _generators(self) -> Generators:
        """The generators, which are searched in the process that draws."""
        return Generators(generators_in(self._drawing, {}))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context manager that restores all generators at its end."""
        with self._generators.kept() if self._drawing else contextlib.nullcontext():
            yield

    def of_sample(self, epoch: int, key: int) -> None:
        """Seed the generators for a sample of an epoch."""
        if self._samples_draw:
            self._seed(epoch, key, 0)

    def of_batch(self, epoch: int, number: int) -> None:
        """Seed the generators for a whole batch of an epoch."""
        if self._drawing:
            self._seed(epoch, number, 1)

    def drawn_by(self, action: Callable[[], T]) -> tuple[T, bool]:
        """The result of an action, and whether it has drawn random numbers, which is then undone."""
        if not self._drawing:
            return action(), False
        before = self._generators.states()
        result = action()
        drawn = pickle.dumps(before) != pickle.dumps(self._generators.states())
        if drawn:
            self._generators.restore(before)
        return result, drawn

    def _seed(self, *keys: int) -> None:
        self._generators.seed(_hash(repr((self._salt, *keys)).encode()))


def is_plain(data: Any) -> bool:
    """Whether a data set reads its samples from memory, or a ``collate_fn`` is PyTorch's: neither draws numbers."""
    if isinstance(data, ConcatDataset):
        return all(map(is_plain, data.datasets))
    plain = type(data) in (TensorDataset, list, tuple) or data is default_collate
    return is_plain(data.dataset) if isinstance(data, Subset) else plain


def _hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) >> 1  # PyTorch takes seeds below 2**63 only


def _state(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state().numpy() if isinstance(generator, torch.Generator) else generator.get_state()
