"""Gradients of a parameter that two pipeline stages share: each gets the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.worker.adapters.torch.parallel.stages import Tie


class TiedGradients:
    """The parameters that this rank's stages share with others, or with each other.

    Args:
        ties: of the whole model.
        stages: this rank's, by number.
        rank_of: the rank within pp that has a stage.
        group: the ranks of pp.
    """

    def __init__(
        self, ties: Sequence[Tie], stages: Mapping[int, nn.Module], rank_of: Callable[[int], int], group: Any
    ) -> None:
        self._group = group
        # In the order of the stages, which is the order in which all ranks add up; None where another rank has it.
        self._shared: list[tuple[list[nn.Parameter | None], int]] = []
        self._copies: set[int] = set()
        for tie in ties:
            own = [
                stages[stage].get_parameter(name) if stage in stages else None
                for name, stage in zip(tie.names, tie.stages, strict=True)
            ]
            here = dist.get_rank(group)
            peer = next((rank for rank in map(rank_of, tie.stages) if rank != here), here)
            if own[0] is own[1]:  # neither of them here, or one that is not divided
                continue
            self._shared.append((own, peer))
            if own[1] is not None:
                self._copies.add(id(own[1]))

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a norm over all stages counts this parameter in another stage."""
        return id(parameter) in self._copies

    @torch.no_grad()
    def restart(self) -> None:
        """Before further backward passes: of a sum that both copies have already, the second lets go."""
        for (_, copy), _ in self._shared:
            if copy is not None and copy.grad is not None:
                copy.grad.zero_()

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace the gradients by their sums, so that both copies have what the one parameter would have. Collective.

        After each backward pass, and not only before an update: a script may clip or change gradients by itself.
        """
        for own, peer in self._shared:
            locals_ = [None if each is None else _local(each) for each in own]
            present = [each for each in locals_ if each is not None]
            if len(present) == 2:
                present[0].add_(present[1])
                present[1].copy_(present[0])
                continue
            received = torch.empty_like(present[0])
            self._exchange(present[0], received, peer)
            # Addition of two numbers is the same either way round.
            present[0].add_(received)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
        to = dist.get_global_rank(self._group, peer)
        operations = [
            dist.P2POp(dist.isend, sent, to, self._group),
            dist.P2POp(dist.irecv, received, to, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor):
        # An embedding's is whole on every rank of tp, though its weight is divided.
        gradient = gradient.redistribute(placements=cast(Any, parameter).placements)
    parameter.grad = gradient
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local
