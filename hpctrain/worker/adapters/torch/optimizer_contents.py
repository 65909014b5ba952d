"""Which parameters and which other optimizers an optimizer holds, and its state by the names of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from hpctrain.common.checkpoints.read import shape_of
from hpctrain.worker.adapters.torch.tensor_pieces import fill, is_dtensor, laid_out, tensor_of

if TYPE_CHECKING:
    from hpctrain.worker.adapters.guard import Guard

Optimizer = torch.optim.Optimizer


@dataclass
class OptimizerFacts:
    """What is known of an optimizer, and the guard of the model whose first optimizer it is."""

    guard: Guard | None = None
    # By FSDP2 or a pipeline.
    reduced_elsewhere: bool = False
    # Another optimizer holds it, so that its steps are made within those of that one.
    within: bool = False
    # It was found to be one that waits for reduced gradients.
    checked: bool = False
    # The ids of the parameters that it updates and that belong to no model of ht.distribute.
    others: set[int] = field(default_factory=set)


_facts: weakref.WeakKeyDictionary[Optimizer, OptimizerFacts] = weakref.WeakKeyDictionary()


def facts_of(optimizer: Optimizer) -> OptimizerFacts:
    """The facts of an optimizer, which live as long as it does."""
    return _facts.setdefault(optimizer, OptimizerFacts())


def guard_of(optimizer: Optimizer) -> Guard:
    """The guard that compares the parameters of ``distribute``'s first optimizer, which has some of its own."""
    guard = facts_of(optimizer).guard
    assert guard is not None
    return guard


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds (SAM, Lookahead), from the outside to the inside."""
    found = [optimizer]
    for outer in found:  # which grows meanwhile
        for value in vars(outer).values():
            held = value.values() if isinstance(value, dict) else value
            for each in held if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(each, Optimizer) and each not in found:
                    found.append(each)
    return found


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters in the optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def whole_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The model's parameter that an optimizer's parameter is a part of, or that parameter itself."""
    # Recorded where ranks divide the state of an optimizer (ZeRO 1).
    whole: torch.nn.Parameter = getattr(parameter, "_hpctrain_whole", parameter)
    return whole


Named = Iterable[tuple[str, torch.nn.Parameter]]

# PyTorch's load_state_dict treats this entry as a single number too, whatever the parameter's shape.
_STEP = "step"


def optimizer_tensors(parameters: Named, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state, by ``PARAMETER.SLOT``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{name}.{slot}": value
        for index, (name, _) in _updated(parameters, optimizer).items()
        for slot, value in state.get(index, {}).items()
        if torch.is_tensor(value)
    }


def load_optimizer(
    parameters: Named, optimizer: torch.optim.Optimizer, state: Mapping[str, NDArray[Any]], prefix: str
) -> None:
    """Replace an optimizer's state by one saved on any mesh, for the parameters that this rank has a part of.

    The names of its arrays in ``state`` begin with ``prefix``. It may have more, of other stages of a pipeline.
    """
    updated = _updated(parameters, optimizer)
    indices = {name: index for index, (name, _) in updated.items()}
    values: dict[int, dict[str, torch.Tensor]] = {}
    for key in state:
        name, _, slot = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and name in indices:
            index = indices[name]
            values.setdefault(index, {})[slot] = _like(updated[index][1], state, key, slot)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": values})


def _like(parameter: torch.Tensor, state: Mapping[str, NDArray[Any]], key: str, slot: str) -> torch.Tensor:
    """A saved tensor, laid out as its parameter."""
    alike = slot != _STEP
    if alike and is_dtensor(parameter) and shape_of(state, key) == tuple(parameter.shape):
        tensor = torch.empty_like(parameter, requires_grad=False)
        fill(tensor, state, key)
        return tensor
    tensor = tensor_of(state[key])
    return laid_out(tensor, parameter) if alike and tensor.shape == parameter.shape else tensor


def _updated(parameters: Named, optimizer: torch.optim.Optimizer) -> dict[int, tuple[str, torch.Tensor]]:
    """The parameters that an optimizer updates, or its parts of them, with names, by number in the ``state_dict``."""
    names = {id(parameter): name for name, parameter in parameters}
    packed = optimizer.state_dict()["param_groups"]
    return {
        index: (names[id(whole_of(each))], each)
        for group, numbers in zip(optimizer.param_groups, packed, strict=True)
        for each, index in zip(group["params"], numbers["params"], strict=True)
    }


def learning_rate(optimizer: Optimizer) -> float | None:
    """The first group's learning rate; None where it has none, or where reading it would wait for a GPU."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or getattr(rate, "is_cuda", False) else float(rate)
