"""Where an optimizer refers to parameters: in its groups, its state, attributes of its own, and optimizers within it.

Parameters are replaced within the existing lists and dictionaries, because an optimizer, or one around it, may share
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Optimizer = torch.optim.Optimizer
Now = Callable[[torch.Tensor], Sequence[torch.Tensor] | None]
Move = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Objects that are not searched: a model's parameters are replaced in the model.
_CLOSED = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# By the parts that optimizers have where ranks divide an optimizer's state (ZeRO 1): the model's parameters.
_wholes = WeakIdKeyDictionary()


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds (SAM, Lookahead), from the outside to the inside."""
    found = dict[int, Optimizer]()
    waiting: deque[Any] = deque([optimizer])
    while waiting:
        each = waiting.popleft()
        if isinstance(each, Optimizer) and id(each) not in found:
            found[id(each)] = each
            waiting.extend(vars(each).values())
        elif isinstance(each, list | tuple):
            waiting.extend(value for value in each if isinstance(value, Optimizer))
        elif isinstance(each, dict):
            waiting.extend(value for value in each.values() if isinstance(value, Optimizer))
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters in the optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def set_whole(part: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Record the parameter that a part belongs to."""
    _wholes[part] = parameter


def whole_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The model's parameter that an optimizer's parameter is a part of, or that parameter itself."""
    # Looked for only where there are parts: a step asks for each parameter.
    whole: torch.nn.Parameter = _wholes.get(parameter, parameter) if _wholes else parameter
    return whole


def replace(optimizer: Optimizer, now: Now, move: Move) -> None:
    """Replace parameters wherever an optimizer refers to them.

    Args:
        optimizer: changed in place, in its groups, its state and all else that it holds.
        now: returns a parameter's replacements, several or none; None for a tensor that stays.
        move: takes the name of a tensor that is kept for a parameter, the tensor, the parameter and its replacement.
            Returns what to keep for the replacement.
    """
    _Replacing(now, move).within(optimizer)


class _Replacing:
    def __init__(self, now: Now, move: Move) -> None:
        self._now, self._move = now, move
        # Holds the objects as well, so that their ids are not used again.
        self._done: dict[int, tuple[Any, Any]] = {}

    def within(self, value: Any) -> Any:
        """The value with all parameters in it replaced: the same object, if it can change."""
        if isinstance(value, torch.Tensor):
            new = self._now(value)
            return value if new is None else next(iter(new), None)
        if id(value) in self._done:
            return self._done[id(value)][1]
        self._done[id(value)] = (value, value)
        if isinstance(value, dict):
            self._dictionary(value)
        elif isinstance(value, MutableSequence):
            items = self._items(value)
            value.clear()
            value.extend(items)
        elif isinstance(value, set):
            items = self._items(value)
            value.clear()
            value.update(items)
        elif isinstance(value, tuple):
            self._done[id(value)] = (value, value := self._tuple(value))
        elif hasattr(value, "__dict__") and not isinstance(value, _CLOSED):
            for name, each in list(vars(value).items()):
                vars(value)[name] = self.within(each)
        return value

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = self._items(value)
        if len(items) == len(value) and all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)

    def _items(self, values: Iterable[Any]) -> list[Any]:
        """The values, with each parameter among them replaced."""
        items: list[Any] = []
        for each in values:
            new = self._now(each) if isinstance(each, torch.Tensor) else None
            items += [self.within(each)] if new is None else new
        return items

    def _dictionary(self, value: dict[Any, Any]) -> None:
        if "params" in value and "param_names" in value:
            counts = [1 if (new := self._now(each)) is None else len(new) for each in value["params"]]
            names = zip(value["param_names"], counts, strict=True)
            value["param_names"][:] = [name for name, count in names for _ in range(count)]
        items: list[tuple[Any, Any]] = []
        for key, each in value.items():
            new = self._now(key) if isinstance(key, torch.Tensor) else None
            if new is None:
                items.append((key, self.within(each)))
            else:
                items += [(one, self._kept("", each, key, one)) for one in new]
        value.clear()
        value.update(items)

    def _kept(self, name: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
        """The value that is kept for a parameter, converted for the parameter that replaces it."""
        if isinstance(value, torch.Tensor):
            return self._move(name, value, old, new) if self._now(value) is None else self.within(value)
        if isinstance(value, dict):
            # A copy, because each of several replacements needs a dictionary of its own.
            kept = {key: self._kept(str(key), each, old, new) for key, each in value.items()}
            value = value.copy()
            value.update(kept)
            return value
        if isinstance(value, list | tuple | deque):
            items = [self._kept(name, each, old, new) for each in value]
            if isinstance(value, deque):
                return deque(items, value.maxlen)
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        return self.within(value)
