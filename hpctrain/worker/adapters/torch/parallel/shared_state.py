"""ZeRO 1 (arXiv 1910.02054, section 5.1): each rank keeps a part of the optimizer's state, and updates that part.

The optimizer keeps its class and its groups. In place of each parameter it gets a DTensor divided along the first
dimension, whose local part is a view of the parameter. Gradients are reduced as without it.

PyTorch's ZeroRedundancyOptimizer is another class of optimizer, and gives whole parameters to ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain.worker.adapters.torch.backward_passes import BackwardPasses, watch_gradients
from hpctrain.worker.adapters.torch.guarding import checksums
from hpctrain.worker.adapters.torch.optimizer_contents import (
    Optimizer,
    optimizers_in,
    parameters_of,
)
from hpctrain.worker.adapters.torch.parallel.optimizers import agree_on_overflow, rewire
from hpctrain.worker.adapters.torch.steps import with_closure
from hpctrain.worker.adapters.torch.tensor_pieces import local_tensor
from hpctrain.worker.comm import Communicator


def share_state(comm: Communicator, optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """Divide the optimizers' state over the ranks of a 1-D mesh, on which the parameters are equal.

    Args:
        comm: the communicator whose buffers the gradients may lie in.
        optimizers: those whose parameters' gradients are reduced already.
    """
    agree_on_overflow(optimizers, mesh)
    for optimizer in optimizers:
        shared = _Shared(optimizer, mesh)
        comm.before_shutdown(shared.drop_gradients)


class _Shared:
    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parts: list[tuple[nn.Parameter, nn.Parameter]] = []
        # The optimizer whose step is running, around any steps of optimizers within it.
        self._outer: Optimizer | None = None
        self._in_method = False
        rewire(optimizer, {id(each): [self._part(each)] for each in parameters_of(optimizer)})
        for each in optimizers_in(optimizer):
            each.register_step_pre_hook(self._before_step)
            each.register_step_post_hook(self._after_step)
            # Replaced because the gradients belong to the whole parameters, which the optimizer does not have.
            each.zero_grad = self._zero_grad  # type: ignore[method-assign]
            for name in _own_methods(each):
                setattr(each, name, self._watched(name, getattr(each, name)))
        # Set the parts' gradients after each pass, for scripts that clip the optimizer's parameters.
        passes = BackwardPasses(self._take_gradients)
        watch_gradients((whole for _, whole in self._parts), passes.reached)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        part = nn.Parameter(self._divided(parameter.detach()), requires_grad=parameter.requires_grad)
        self._parts.append((part, parameter))
        part._hpctrain_whole = parameter  # type: ignore[attr-defined]
        return part

    def _divided(self, tensor: torch.Tensor) -> DTensor:
        """A DTensor whose local part is a view of this rank's rows."""
        flat = tensor if tensor.dim() else tensor.view(1)
        return DTensor.from_local(
            self._rows(tensor), self._mesh, [Shard(0)], run_check=False, shape=flat.shape, stride=flat.stride()
        )

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor if tensor.dim() else tensor.view(1)
        size, offset = Shard.local_shard_size_and_offset(flat.shape[0], self._mesh.size(), self._mesh.get_local_rank())
        return flat[offset : offset + size] if size else flat[:0]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._outer not in (None, optimizer):
            return None
        self._outer = optimizer
        self._take_gradients()
        return with_closure(args, kwargs, self._evaluated)

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """A closure's loss, at the parameters as they are now, with the gradients for the rest of the step."""
        self._give_parameters()
        loss = closure()
        self._take_gradients()
        return loss

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._outer is optimizer:
            self._outer = None
            self._give_parameters()

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method other than step, which may change parameters too: as SAM's first_step, or ScheduleFree's eval."""

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._outer is not None or self._in_method:
                return method(*args, **kwargs)
            self._given = self._content()
            self._in_method = True
            self._take_gradients()
            try:
                result = method(*args, **kwargs)
            finally:
                self._in_method = False
            # A rank without rows of any parameter sees no change.
            changed = torch.tensor([self._content() != self._given], dtype=torch.int32, device=self._mesh.device_type)
            dist.all_reduce(changed, dist.ReduceOp.MAX, self._mesh.get_group())
            if changed.item():
                self._give_parameters()
            return result

        return called

    def _content(self) -> tuple[list[int], list[int]]:
        """A value that a write to a part changes: DTensors count versions, and checksums show writes by ``.data``."""
        own = checksums(local_tensor(part) for part, _ in self._parts)
        return [part._version for part, _ in self._parts], own.tolist()

    def _take_gradients(self) -> None:
        for part, parameter in self._parts:
            if parameter.grad is None:
                part.grad = None
            elif part.grad is None or local_tensor(part.grad).data_ptr() != self._rows(parameter.grad).data_ptr():
                part.grad = self._divided(parameter.grad)

    def drop_gradients(self) -> None:
        """Drop the parts' gradients, which are views of the whole ones."""
        for part, _ in self._parts:
            part.grad = None

    @torch.no_grad()
    def _give_parameters(self) -> None:
        for part, parameter in self._parts:
            if part.requires_grad:
                parameter.copy_(cast(DTensor, part).full_tensor().view(parameter.shape))
        self.drop_gradients()
        if self._in_method:
            self._given = self._content()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self.drop_gradients()
        for _, parameter in self._parts:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _own_methods(optimizer: Optimizer) -> Iterator[str]:
    """Names of public methods that PyTorch's class of all optimizers does not have."""
    for kind in type(optimizer).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                yield name
