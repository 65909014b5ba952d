"""Forward passes through the stages of a pipeline, for evaluations.

``schedule.eval`` of torch.distributed.pipelining fails for stages that pass activations to each other on one rank (zbv,
PyTorch 2.13), and infers all shapes anew after each change between training and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DIMENSIONS = 8


@torch.no_grad()
def run_forward(
    stages: Mapping[int, nn.Module],
    count: int,
    inputs: Sequence[torch.Tensor],
    rank_of: Callable[[int], int],
    group: Any,
) -> list[torch.Tensor]:
    """The outputs of the last stage for each micro-batch, all of one shape; nothing on ranks without it. Collective.

    Args:
        stages: this rank's, by number.
        count: of all stages.
        inputs: of the first stage.
        rank_of: the rank within pp that has a stage.
        group: the ranks of pp.
    """
    here, outputs = dist.get_rank(group), list(inputs)
    for number, stage in sorted(stages.items()):
        source = rank_of(number - 1) if number else here
        if source != here:
            outputs = _receive(len(inputs), source, group)
        outputs = [stage(each) for each in outputs]
        _reshard(stage)
        if number + 1 < count and (to := rank_of(number + 1)) != here:
            _send(outputs, to, group)
    return outputs if count - 1 in stages else []


def _send(tensors: Sequence[torch.Tensor], rank: int, group: Any) -> None:
    first = tensors[0]
    header = torch.zeros(2 + _DIMENSIONS, dtype=torch.int64, device=first.device)
    known = [_DTYPES.index(first.dtype), first.dim(), *first.shape]
    header[: len(known)] = torch.tensor(known, device=first.device)
    for each in (header, *tensors):
        dist.send(each.contiguous(), group=group, group_dst=rank)


def _receive(count: int, rank: int, group: Any) -> list[torch.Tensor]:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    header = torch.zeros(2 + _DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=rank)
    dtype, dimensions, *shape = header.tolist()
    received = [torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device) for _ in range(count)]
    for each in received:
        dist.recv(each, group=group, group_src=rank)
    return received


def _reshard(stage: nn.Module) -> None:
    """Without a backward pass FSDP2 would keep the gathered parameters."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
