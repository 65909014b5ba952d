"""The mean of the ranks' PyTorch parameters, and an outer optimizer's step with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from hpctrain.common.recipes.sync import Outer
from hpctrain.worker.comm import Communicator


class TorchOuter:
    """Averages parameters that each rank has trained by itself from the same values.

    Args:
        model: its parameters are float32, on one device, and equal on all ranks.
        outer: what is done with the mean.

    Attributes:
        state: the outer optimizer's momentum by name in a checkpoint, in the parameters' order.
        seconds: how long the last reduction took.
    """

    def __init__(self, model: torch.nn.Module, comm: Communicator, outer: Outer) -> None:
        self._parameters = trained(model)
        self._engine = comm.torch()
        self._outer = outer if outer.optimizer == "nesterov" else None
        begun = flat(self._parameters)
        self._mean = self._engine.allocate(begun.numel(), begun.dtype, begun.device)
        self._before = begun
        self.state = {"outer.velocity": torch.zeros_like(begun)} if self._outer else {}
        self.seconds = 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Replace the parameters by what the recipe makes of their mean. Collective.

        With Nesterov's momentum (Douillard et al. 2023, algorithm 1; as torch.optim.SGD defines it) the gradient is
        g = before - mean: v = m v + g, and the parameters are before - rate (g + m v).
        """
        mean = self._mean.copy_(flat(self._parameters))
        begin = time.perf_counter()
        self._engine.allreduce(mean, "hpctrain.parameters").wait()
        self.seconds = time.perf_counter() - begin
        if self._outer:
            rate, momentum = self._outer.learning_rate, self._outer.momentum
            gradient = self._before - mean
            velocity = self.state["outer.velocity"].mul_(momentum).add_(gradient)
            mean = self._before.sub_(gradient.add_(velocity, alpha=momentum), alpha=rate)
        assign(self._parameters, mean)

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a checkpoint whose parameters were already copied into the model."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self._before.copy_(flat(self._parameters))


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """A copy of the parameters, one after the other."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


@torch.no_grad()
def assign(parameters: Sequence[torch.nn.Parameter], vector: torch.Tensor) -> None:
    """Replace the parameters by the parts of a vector."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view(parameter.shape))
