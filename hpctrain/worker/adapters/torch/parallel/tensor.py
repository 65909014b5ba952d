"""Tensor parallelism: the layers of a plan are divided over tp, all other parameters become replicated DTensors.

``clip_grad_norm_`` and the fused optimizers need all parameters on one mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.plan import present


def parallelise_tensors(model: nn.Module, mesh: DeviceMesh, tensor: Mapping[str, ParallelStyle]) -> None:
    """Divide a model's layers over a 1-D mesh, on whose ranks it is equal. Names that it lacks are skipped.

    Raises:
        HpctrainError: modules that share a parameter are divided in different ways.
    """
    ties = tied_names(model)
    modules = dict(model.named_modules())
    for pattern, style in tensor.items():
        if present(modules, [pattern]):
            # The ranks are equal already, so nothing is sent.
            parallelize_module(model, mesh, {pattern: style}, src_data_rank=None)
    _replicate_rest(model, mesh)
    _tie_again(model, ties)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Share parameters again: parallelize_module has given each module one of its own."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            given = model.get_parameter(name)
            if given.placements != kept.placements:  # type: ignore[attr-defined]
                refuse_tie(first, name)
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).register_parameter(attribute, kept)


def refuse_tie(first: str, other: str) -> NoReturn:
    """Raise HpctrainError for two modules that share a parameter, which the plan divides in two ways."""
    raise HpctrainError(
        "HT-parallel-plan-not-valid",
        "{first!r} and {other!r} are one parameter, which the plan divides in two ways",
        "divide both along the same dimension (RowwiseParallel of an embedding, ColwiseParallel of a linear layer), or "
        "give each a parameter of its own",
        first=first,
        other=other,
    )


def _replicate_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        whole = {name: each for name, each in module.named_parameters(recurse=False) if not isinstance(each, DTensor)}
        for name, parameter in whole.items():
            replica = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(replica, requires_grad=parameter.requires_grad))
        if whole:
            compute = _Whole(list(whole))
            module.register_forward_pre_hook(compute.begin)
            module.register_forward_hook(compute.end, always_call=True)


class _Whole:
    """Lets a module compute with plain tensors in place of its parameters, which are whole on every rank of tp.

    Its gradients are then equal on all of them, as its inputs are.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def begin(self, module: nn.Module, _: Any) -> None:
        for name in self._names:
            parameter = cast(DTensor, module._parameters[name])
            # An object's own dictionary takes precedence over nn.Module's parameters.
            module.__dict__[name] = parameter.to_local(grad_placements=[Replicate()])

    def end(self, module: nn.Module, *_: Any) -> None:
        for name in self._names:
            module.__dict__.pop(name, None)
