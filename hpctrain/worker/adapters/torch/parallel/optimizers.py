"""Optimizers on a mesh: of a divided model's DTensors, of a part of the state (ZeRO 1), with GradScalers that agree."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from hpctrain.common import bucket_groups
from hpctrain.common.bucket_groups import BUCKET_BYTES, BucketMember
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.backward_passes import BackwardPasses, watch_gradients
from hpctrain.worker.adapters.torch.optimizer_contents import (
    Optimizer,
    optimizers_in,
    parameters_of,
    whole_of,
)
from hpctrain.worker.adapters.torch.steps import with_closure
from hpctrain.worker.adapters.torch.tensor_pieces import local_pieces, local_tensor
from hpctrain.worker.comm import Communicator

New = Mapping[int, Sequence[nn.Parameter]]

# Their operations on several tensors at once are exact with DTensors; those of ASGD are not, and others lack some.
_FOREACH = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop),
)
# By package and class: they compute with parts of divided parameters as if these were whole, without an error.
_NEED_WHOLE = {("torch", "Muon"), ("pytorch_optimizer", "Gravity"), ("pytorch_optimizer", "Nero")}


class Rewiring:
    """Which parameters of a model its optimizers update, by name. Create it before the parameters are replaced."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._old = dict(model.named_parameters(remove_duplicate=False))
        known = {id(each) for each in self._old.values()}
        for optimizer in optimizers:
            _check(optimizer, known)

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Give each optimizer the parameters that now have its parameters' names, except names that no model has."""
        new = {name: each for model in models for name, each in model.named_parameters(remove_duplicate=False)}
        now: dict[int, dict[int, nn.Parameter]] = {}
        for name, old in self._old.items():
            own = now.setdefault(id(old), {})
            if name in new:
                own.setdefault(id(new[name]), new[name])
        for optimizer in self._optimizers:
            rewire(optimizer, {old: list(each.values()) for old, each in now.items()})
        self._old.clear()


def rewire(optimizer: Optimizer, now: New) -> None:
    """Replace an optimizer's parameters in its groups, lists and state, and divide the state for them.

    Lists and dictionaries are changed in place, because an optimizer, or one around it, may share them.

    Args:
        now: the replacements by the ``id`` of each old parameter, several or none.
    """
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            if "param_names" in group:
                names = zip(group["param_names"], group["params"], strict=True)
                group["param_names"][:] = [name for name, old in names for _ in now.get(id(old), [old])]
        lists = (value for value in vars(each).values() if isinstance(value, list))
        for parameters in (*(group["params"] for group in each.param_groups), *lists):
            parameters[:] = [new for old in parameters for new in now.get(id(old), [old])]
        _move_state(each.state, now)
        _update_together(each)


def _move_state(state: dict[Any, Any], now: New) -> None:
    for old in [each for each in state if id(each) in now]:
        kept = state.pop(old)
        for new in now[id(old)]:
            state[new] = {name: _moved(str(name), value, old, new) for name, value in kept.items()}


def _moved(name: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: _divided(name, tensor, old, new), value)


@torch.no_grad()
def _divided(name: str, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the state, which every rank has whole. Numbers stay unchanged."""
    if not isinstance(new, DTensor) or (value.numel() == 1 and (name == "step" or new.numel() > 1)):
        return value
    if value.numel() != 1 and value.shape != old.shape:
        raise HpctrainError(
            "HT-optimizer-not-supported",
            "the optimizer keeps {name!r} of shape {shape} for a parameter of shape {parameter_shape}, "
            "which cannot be divided with it",
            "give ht.distribute a new optimizer, and load a checkpoint after it",
            name=name,
            shape=tuple(value.shape),
            parameter_shape=tuple(old.shape),
        )
    part = torch.empty_like(new, dtype=value.dtype, requires_grad=False)
    whole, local = value.view(new.shape), local_tensor(part)
    for slices, box in local_pieces(part):
        local[slices].copy_(whole[tuple(slice(b, e) for b, e in zip(box.offsets, box.ends, strict=True))])
    return part


def _check(optimizer: Optimizer, known: set[int]) -> None:
    foreign = next((each for each in parameters_of(optimizer) if id(each) not in known), None)
    if foreign is not None:
        raise HpctrainError(
            "HT-optimizer-other-parameters",
            "{optimizer} updates a parameter of shape {shape} that the model does not have",
            "make the optimizer from model.parameters(), after the model's last layer was added or replaced",
            optimizer=type(optimizer).__name__,
            shape=tuple(foreign.shape),
        )
    if any((kind.__module__.partition(".")[0], kind.__name__) in _NEED_WHOLE for kind in type(optimizer).__mro__):
        raise HpctrainError(
            "HT-optimizer-not-supported",
            "{optimizer} computes other numbers from divided parameters than from whole ones",
            "choose another optimizer (docs/optimizers.md), or a mesh of dp_replicate alone",
            optimizer=type(optimizer).__name__,
        )


def _update_together(optimizer: Optimizer) -> None:
    """Let an optimizer of DTensors update all of them at once, since a loop spends its time on dispatch.

    The script's own choice stays. Rules that are not known to be exact that way get a loop.
    """
    for group in optimizer.param_groups:
        parameters, chosen = group["params"], group.get("foreach", False) is not None or group.get("fused") is not None
        if not chosen and any(isinstance(each, DTensor) for each in parameters):
            fits = type(optimizer) in _FOREACH and all(each.is_floating_point() for each in parameters)
            group["foreach"] = fits and not group.get("capturable") and not group.get("differentiable")


def agree_on_overflow(optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """From now on, a GradScaler leaves out a step of these optimizers on all ranks of the mesh, or on none.

    PyTorch asks the ranks that divide the first gradient alone, and those of other stages and layers may not overflow.
    """
    for optimizer in optimizers:
        for each in optimizers_in(optimizer):
            each._hpctrain_mesh = mesh  # type: ignore[attr-defined]
    unscale = torch.amp.GradScaler._unscale_grads_
    if hasattr(unscale, "agrees"):
        return

    def unscale_alike(
        scaler: torch.amp.GradScaler, optimizer: Optimizer, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # With ZeRO 1 a script clips the whole gradients after ``unscale_``; the parts have some within a step only.
        groups = [{"params": [whole_of(each) for each in group["params"]]} for group in optimizer.param_groups]
        # It reads only the groups of an optimizer.
        of_groups: Any = SimpleNamespace(param_groups=groups)
        by_device = unscale(scaler, of_groups, inverse, found, allow_fp16)
        ranks: DeviceMesh | None = getattr(optimizer, "_hpctrain_mesh", None)
        if ranks is not None:
            by_device = by_device or {found.device: found}  # The stages of a rank may be frozen.
            for overflow, group in itertools.product(by_device.values(), ranks.get_all_groups()):
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group)
        return by_device

    unscale_alike.agrees = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale_alike  # type: ignore[method-assign, assignment]


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
    """ZeRO 1 (arXiv 1910.02054, section 5.1): each rank keeps a part of an optimizer's state, and updates that part.

    The optimizer keeps its class and its groups. In place of each parameter it gets a DTensor divided along the first
    dimension, whose local part is a view of the parameter. Gradients are reduced as without it. PyTorch's
    ZeroRedundancyOptimizer is another class of optimizer, and gives whole parameters to ranks.
    """

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parts: list[tuple[nn.Parameter, nn.Parameter]] = []
        # The optimizer whose step is running, around any steps of optimizers within it.
        self._outer: Optimizer | None = None
        self._in_method = False
        rewire(optimizer, {id(each): [self._part(each)] for each in parameters_of(optimizer)})
        for each in optimizers_in(optimizer):
            _without_gaps(each)
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
        """A DTensor whose local part is a view of this rank's rows of a parameter."""
        whole = parameter.detach() if parameter.dim() else parameter.detach().view(1)
        rows, shape, stride = self._rows(whole), whole.shape, whole.stride()
        divided = DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        part = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        self._parts.append((part, parameter))
        part._hpctrain_whole = parameter  # type: ignore[attr-defined]
        return part

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor if tensor.dim() else tensor.view(1)
        size, offset = Shard.local_shard_size_and_offset(flat.shape[0], self._mesh.size(), self._mesh.get_local_rank())
        return flat[offset : offset + size] if size else flat[:0]

    def _padded(self, part: nn.Parameter) -> torch.Tensor:
        """This rank's rows, as many as those of the first rank."""
        return Shard(0)._maybe_pad_tensor(local_tensor(part), len(part), self._mesh.size())

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
            self._in_method = True
            self._take_gradients()
            try:
                result = method(*args, **kwargs)
            finally:
                self._in_method = False
            self._give_parameters(changed_only=True)  # autograd counts changes of what a graph has
            self._take_gradients()  # for scripts that clip the optimizer's parameters next
            return result

        return called

    def _take_gradients(self) -> None:
        for part, parameter in self._parts:
            if parameter.grad is None:
                part.grad = None
            elif part.grad is None or local_tensor(part.grad).data_ptr() != self._rows(parameter.grad).data_ptr():
                # from_local(), which checks more, takes 50 times as long, in each step.
                spec = cast(DTensor, part)._spec
                part.grad = DTensor(self._rows(parameter.grad), spec, requires_grad=False)

    def drop_gradients(self) -> None:
        """Drop the parts' gradients, which are views of the whole ones."""
        for part, _ in self._parts:
            part.grad = None

    @torch.no_grad()
    def _give_parameters(self, *, changed_only: bool = False) -> None:
        # PyTorch 2.13 is the first that has it; earlier ones refuse meshes where they are made.
        from torch.distributed._functional_collectives import all_gather_single_coalesced

        trained = [(part, parameter) for part, parameter in self._parts if part.requires_grad]
        members = [BucketMember(nbytes=parameter.nbytes, kind=parameter.device) for _, parameter in trained]
        # One message for many parameters, but not for all, which would take the memory of another model.
        for bucket in bucket_groups.group(members, BUCKET_BYTES, in_place=False, compressed=False):
            own = [trained[number] for number in bucket.members]
            # As bytes, so that types may differ.
            sent = [self._padded(part).reshape(-1).view(torch.uint8) for part, _ in own]
            for (_, parameter), rows in zip(own, all_gather_single_coalesced(sent, self._mesh), strict=True):
                whole = rows.view(parameter.dtype)[: parameter.numel()].view(parameter.shape)
                if not changed_only or not torch.equal(whole, parameter):
                    parameter.copy_(whole)
        self.drop_gradients()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self.drop_gradients()
        for _, parameter in self._parts:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _without_gaps(optimizer: Optimizer) -> None:
    """Leave out PyTorch's fused kernels, which pass over strides, where the state is laid out otherwise than the rows.

    It is so for rows of a transposed parameter, which have gaps between them.
    """
    for group in optimizer.param_groups:
        rows = [local_tensor(part) for part in group["params"]]
        if group.get("fused") and any(torch.empty_like(own, device="meta").stride() != own.stride() for own in rows):
            group["fused"] = None
            # They alone take a GradScaler's factor themselves.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _own_methods(optimizer: Optimizer) -> Iterator[str]:
    """Names of public methods that PyTorch's class of all optimizers does not have."""
    for kind in type(optimizer).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and not hasattr(Optimizer, name):
                yield name
