"""Reduces the gradients of all parameters of a model that FSDP2 divides, those that this rank did not use too.

FSDP2 joins the gradients that a backward pass made on this rank. Where ranks use different parts of a model (experts,
heads by task), it would add up gradients of different parameters, or end in a collective of different lengths. So each
group reduces zeros for its other trained parameters, once in a pass. A parameter that no rank used gets no gradient,
as in one process: an optimizer leaves it out.

Groups that ranks gather apart, because the plan's shard names modules that a rank calls only for some samples, are
refused: each rank would get parameters of another module.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.backward_passes import is_asking

# Passes after which the order of gathers is compared on a GPU, which reading waits for.
_EVERY = 50


class MissingGradients:
    """The parameters of some groups, all on one mesh, that a backward pass on this rank did not use."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups
        self._filled: set[FSDPParamGroup] = set()
        self._unused: list[FSDPParam] = []
        self._passes = 0
        # A checksum of the order in which groups were gathered, since the beginning.
        self._order = 0
        for place, group in enumerate(groups):
            self._patch(group, str(place).encode())

    def remain(self) -> bool:
        """Whether this pass reduces gradients, and has to fill those of some group."""
        return any(group.reduce_grads and group not in self._filled for group in self._groups)

    def take_back(self) -> None:
        """At the end of a pass that reduced gradients, drop those of parameters that no rank used. Collective.

        Raises:
            HpctrainError: the ranks gathered the parameters of different modules.
        """
        if not self._filled:
            return
        self._passes += 1
        every = [each for group in self._groups for each in group.fsdp_params]
        unused = {id(each) for each in self._unused}
        used = [id(each) not in unused for each in every]
        device = self._groups[0].device
        found = torch.tensor([*used, self._order, -self._order], device="cpu").to(device, non_blocking=True)
        for process_group in _process_groups(self._groups[0]):
            dist.all_reduce(found, dist.ReduceOp.MAX, process_group)
        if unused or device.type == "cpu" or self._passes < _EVERY or self._passes % _EVERY == 0:
            *used, highest, lowest = found.tolist()
            if highest != -lowest:
                _refuse_apart()
            for each, by_any in zip(every, used, strict=True):
                if not by_any:
                    each.sharded_param.grad = None
        self._filled.clear()
        self._unused.clear()

    def _patch(self, group: FSDPParamGroup, place: bytes) -> None:
        reduce, unshard = group.post_backward, group.unshard

        def gather(async_op: bool = False) -> None:
            if group._all_gather_result is None and not group.is_unsharded:
                self._order = zlib.crc32(place, self._order)
            unshard(async_op)

        def fill_and_reduce(*unused: object) -> None:
            reduces = group.reduce_grads
            if is_asking():
                group.reduce_grads = False
            elif reduces:
                # A module that was called twice may get the gradient of a parameter only from its other call.
                self._unused = [each for each in self._unused if not has_unreduced(each)]
                if group not in self._filled:
                    self._filled.add(group)
                    self._fill(group)
            reduce(*unused)
            group.reduce_grads = reduces

        group.post_backward, group.unshard = fill_and_reduce, gather  # type: ignore[method-assign]

    def _fill(self, group: FSDPParamGroup) -> None:
        trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        for each in trained:
            if hasattr(each, "_unsharded_param") and not has_unreduced(each):
                if each.sharded_param.grad is None:
                    self._unused.append(each)
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param, requires_grad=False)
        if any(each.unsharded_accumulated_grad is not None for each in trained):
            # Gradients that are reduced together have one type: with a plan's precision, that of the accumulated ones.
            for each in trained:
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()


def _refuse_apart() -> None:
    raise HpctrainError(
        "HT-plan-parts-differ",
        "the ranks called different modules of the plan's shard, or called them in different orders, and got each "
        "other's parameters",
        "leave modules that a rank calls only for some samples, such as experts, out of shard: they are gathered with "
        "the module around them",
        exit_code=1,
    )


def has_unreduced(parameter: FSDPParam) -> bool:
    """Whether a parameter has a gradient that FSDP2 has not reduced."""
    return hasattr(parameter, "_unsharded_param") and (
        parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None
    )


def _process_groups(group: FSDPParamGroup) -> list[dist.ProcessGroup]:
    mesh = group.mesh_info
    found = [getattr(mesh, name, None) for name in ("shard_process_group", "replicate_process_group")]
    return [each for each in found if each is not None and each.size() > 1]
