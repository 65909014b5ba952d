"""An average of a PyTorch model's parameters and statistics over the run."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from hpctrain.common.checkpoints.layout import STATISTICS
from hpctrain.worker.comm import Communicator
from hpctrain.worker.models.batch_norm import means_over_ranks


class TorchAverage:
    """A copy of all named values in a model, which follows the model.

    Attributes:
        parameters, buffers: the averages by the model's names; ``buffers`` differ between ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.buffers = {name: each.detach().clone() for name, each in model.named_buffers()}

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the average by ``weight`` of the way to the model; counters become the model's."""
        now = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        averages, models = [], []
        for name, each in (self.parameters | self.buffers).items():
            if weight == 1 or not each.is_floating_point():
                each.copy_(now[name])
            else:
                averages.append(each)
                models.append(now[name])
        if averages:
            # Together: the host takes longer to ask a GPU for each of them than the GPU to move it.
            torch._foreach_lerp_(averages, models, weight)

    @torch.no_grad()
    def average_statistics(self, comm: Communicator) -> None:
        """Replace the average's statistics by their plain mean over the ranks."""
        statistics = [each for each in self.buffers.values() if each.is_floating_point()]
        for each, mean in zip(
            statistics, means_over_ranks([each.cpu().numpy() for each in statistics], comm), strict=True
        ):
            each.copy_(torch.from_numpy(mean))

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """The averages by their names in a state, the parameters' with a prefix."""
        parameters = {f"{prefix}{name}": value for name, value in self.parameters.items()}
        return parameters | {f"{STATISTICS}{prefix}{name}": value for name, value in self.buffers.items()}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the average into the model."""
        for name, each in (*self._model.named_parameters(), *self._model.named_buffers()):
            each.copy_((self.parameters | self.buffers)[name])

    def output(self, *inputs: Any) -> Any:
        """The model's output with the averaged values."""
        return functional_call(self._model, self.parameters | self.buffers, inputs)
