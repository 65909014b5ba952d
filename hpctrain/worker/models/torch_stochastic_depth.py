"""Stochastic depth in PyTorch: in training, some samples skip whole blocks of a residual network."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain.worker.models.torch_resnet import Basic, Bottleneck


class StochasticDepth:
    """Drops what blocks add to their shortcuts, per sample (Huang et al. 2016, arXiv 1603.09382).

    The first block is never left out, the last with probability ``rate``, those between in equal steps; what is kept is
    divided by the probability that it is (timm's drop_path_rate).

    Args:
        model: a residual network, on which it acts from now on.
        rate: of the last block.

    Attributes:
        draws: shape (N, blocks), in 0 to 1, for the N samples of the next forward pass in training.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        blocks = [module for module in model.modules() if isinstance(module, Basic | Bottleneck)]
        self.draws: torch.Tensor | None = None
        for number, block in enumerate(blocks):
            self._act(block.last, number, rate * number / (len(blocks) - 1))

    def _act(self, last: nn.Module, number: int, rate: float) -> None:
        def leave_out(module: nn.Module, _: object, outputs: torch.Tensor) -> torch.Tensor:
            if not (module.training and rate):
                return outputs
            assert self.draws is not None
            kept = (self.draws[:, number] >= rate).to(outputs.dtype) / (1 - rate)
            return outputs * kept[:, None, None, None]

        last.register_forward_hook(leave_out)
