"""Reduces the gradients of a model that FSDP2 divides, whichever of its parts a script calls.

FSDP2 gathers the parameters of a module when that module is called, and reduces their gradients when its inputs have
theirs, or at the end of a backward pass that went through one of its outputs. A script may call parts of a module, and
a module may return an object that FSDP2 does not search, or be called several times. So here

* a part that is called by itself gathers the parameters that it needs;
* the end of a backward pass reduces the remaining gradients, and divides parameters that are still gathered. The end of
  a pass within it, such as a reentrant checkpoint's, does not, because the outer pass still uses them;
* outside of passes, the model has its divided parameters, which an optimizer updates: a gathered one would be a stale
  copy after the next step.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.backward_passes import BackwardPasses, in_backward, is_asking
from hpctrain.worker.adapters.torch.buckets import refuse_graph
from hpctrain.worker.adapters.torch.parallel.sharding import groups_of

_Groups = list[FSDPParamGroup]


class Gathered:
    """The parameters of a divided model, by the groups that are gathered together.

    Args:
        model: the root of ``fully_shard``, to which it was applied last.

    Attributes:
        passes: the backward passes through the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root: Any = model._get_fsdp_state()  # type: ignore[operator]
        self._groups: _Groups = groups_of(model)
        self._missing = MissingGradients(self._groups)
        self.passes = BackwardPasses(self._after_pass)
        self._gatherers: dict[FSDPParamGroup, nn.Module] = {}
        self._kept: set[FSDPParamGroup] = set()
        for group in self._groups:
            self._patch(group)
            for parameter in group.fsdp_params:
                self._watch(parameter)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_hook(self._unit_done)
                # Each pass reduces, whatever FSDP2's switches say. One that a script leaves out would be missing beside
                # those of other parts.
                for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
                    setattr(module, name, lambda *_, **__: None)
            elif own := self._used_by(module):
                module.register_forward_pre_hook(functools.partial(self._gather, own), prepend=True)
                module.register_forward_hook(functools.partial(self._part_done, own), always_call=True)

    def divide_again(self) -> None:
        """Free all gathered parameters."""
        self._kept.clear()
        for group in self._groups:
            group.reshard()

    def _patch(self, group: FSDPParamGroup) -> None:
        """Keep parameters gathered after ``torch.autograd.grad(…, create_graph=True)``, whose graph has them.

        It also leaves ``torch.inference_mode()`` while gathering, since tensors made in it cannot be trained later.
        """
        begin, reshard, unshard, wait = group.pre_backward, group.reshard, group.unshard, group.wait_for_unshard

        def pre_backward(default_prefetch: bool, *unused: Any) -> None:
            (self._kept.add if torch.is_grad_enabled() else self._kept.discard)(group)
            begin(default_prefetch, *unused)

        def reshard_unless_kept() -> None:
            if group not in self._kept:
                reshard()

        def gather(async_op: bool = False) -> None:
            with torch.inference_mode(False):
                unshard(async_op)

        def wait_for_gather() -> None:
            with torch.inference_mode(False):
                wait()

        group.pre_backward, group.reshard = pre_backward, reshard_unless_kept  # type: ignore[method-assign]
        group.unshard, group.wait_for_unshard = gather, wait_for_gather  # type: ignore[method-assign]

    def _watch(self, parameter: FSDPParam) -> None:
        """Hook the gathered parameter, which FSDP2 creates when it gathers for the first time, and then keeps."""
        make = parameter.init_unsharded_param
        own = weakref.proxy(self)

        def arrived(gathered: torch.Tensor) -> None:
            # A weak reference: the parameter owns its hook, and a hook that owned the model would keep both alive.
            own._arrived(gathered)

        def made() -> None:
            fresh = not hasattr(parameter, "_unsharded_param")
            make()  # type: ignore[no-untyped-call]
            gathered = parameter._unsharded_param
            gathered._hpctrain_gathered = True  # type: ignore[attr-defined]
            if fresh and gathered.is_floating_point():
                trained = gathered.requires_grad
                # PyTorch refuses hooks of a frozen parameter, which the script may unfreeze later.
                gathered.requires_grad_(True).register_post_accumulate_grad_hook(arrived)
                gathered.requires_grad_(trained)

        parameter.init_unsharded_param = made  # type: ignore[method-assign]

    def _used_by(self, module: nn.Module) -> _Groups:
        """The groups that gather parameters of a module, except those of parts that are gathered by themselves."""
        inner = {
            id(each)
            for part in module.modules()
            if isinstance(part, FSDPModule)
            for group in part._get_fsdp_state()._fsdp_param_groups
            for each in group.fsdp_params
        }
        own = {id(each) for each in module.parameters()}
        return [
            group
            for group in self._groups
            if any(id(each.sharded_param) in own and id(each) not in inner for each in group.fsdp_params)
        ]

    def _gather(self, groups: _Groups, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for group in groups:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
                self._gatherers[group] = module

    def _part_done(self, groups: _Groups, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        for group in groups:
            if self._gatherers.get(group) is module:
                group.reshard()

    def _unit_done(self, module: nn.Module, *_: Any) -> None:
        # In a backward pass, a checkpoint repeats the forward pass, and needs the parameters next.
        if torch.compiler.is_compiling() or in_backward():
            return
        for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
            if group.is_unsharded and (
                not torch.is_grad_enabled() or any(each.sharded_param.grad is not None for each in group.fsdp_params)
            ):
                group.reshard()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.requires_grad:
            refuse_graph(f"a parameter of shape {tuple(parameter.shape)}")
        if self.passes.made():
            self._kept.clear()

    def _after_pass(self) -> None:
        # FSDP2's own callback leaves out groups that were reduced before a checkpointed part made more gradients.
        for _ in range(2):
            if self._missing.remain() or any(
                each.is_unsharded or (each.reduce_grads and any(map(has_unreduced, each.fsdp_params)))
                for each in self._groups
            ):
                self._root._root_post_backward_final_callback()
        self._missing.take_back()


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
        """At the end of a pass that reduced gradients, drop those of parameters that no rank used. Collective."""
        if not self._filled:
            return
        self._passes += 1
        every = [each for group in self._groups for each in group.fsdp_params]
        unused = {id(each) for each in self._unused}
        used = [id(each) not in unused for each in every]
        device = self._groups[0].device
        found = torch.tensor([*used, self._order, -self._order], device="cpu").to(device, non_blocking=True)
        mesh = self._groups[0].mesh_info
        for name in ("shard_process_group", "replicate_process_group"):
            process_group = getattr(mesh, name, None)
            if process_group is not None and process_group.size() > 1:
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
