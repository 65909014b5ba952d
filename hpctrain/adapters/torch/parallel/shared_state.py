"""ZeRO 1 (arXiv 1910.02054, section 5.1): each rank keeps a part of the optimizer's state, and updates that part.

The optimizer keeps its class and its groups. In place of each parameter it gets a DTensor divided along the first
dimension, whose local part is a view of the parameter. Gradients are reduced as without it.

PyTorch's ZeroRedundancyOptimizer is another class of optimizer, and gives whole parameters to ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain.adapters.torch.parallel.optimizers import fuse
from hpctrain.adapters.torch.parts import set_whole


def share_state(optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh) -> None:
    """Divide what optimizers keep over the ranks of a 1-D mesh, on which the parameters are equal."""
    for optimizer in optimizers:
        _Shared(optimizer, mesh)


class _Shared:
    def __init__(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._parts: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._part(each) for each in group["params"]]
        fuse(optimizer)
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.register_step_post_hook(self._give_parameters)
        # The gradients are the whole parameters', of which the optimizer does not know.
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        part = nn.Parameter(self._divided(parameter.detach()), requires_grad=parameter.requires_grad)
        self._parts.append((part, parameter))
        set_whole(part, parameter)
        return part

    def _divided(self, tensor: torch.Tensor) -> DTensor:
        """This rank's rows, as a view."""
        flat = tensor if tensor.dim() else tensor.view(1)
        rows = flat.shape[0]
        size, offset = Shard.local_shard_size_and_offset(rows, self._mesh.size(), self._mesh.get_local_rank())
        local = flat[offset : offset + size] if size else flat[:0]
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=flat.shape, stride=flat.stride()
        )

    def _take_gradients(self, *_: Any) -> None:
        for part, parameter in self._parts:
            part.grad = None if parameter.grad is None else self._divided(parameter.grad)

    @torch.no_grad()
    def _give_parameters(self, *_: Any) -> None:
        for part, parameter in self._parts:
            if part.grad is not None:
                parameter.copy_(cast(DTensor, part).full_tensor().view(parameter.shape))
                part.grad = None

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for _, parameter in self._parts:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
