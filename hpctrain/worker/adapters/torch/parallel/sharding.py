"""torch's DeviceMesh over the ranks of a run, and modules divided over it: tensor parallelism, recomputation, FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import AXES, Axis, Mesh, parse_mesh
from hpctrain.common.settings import TIMEOUT, VERIFY
from hpctrain.common.stderr import tell
from hpctrain.worker.adapters.data_ranks import mesh_of, set_mesh
from hpctrain.worker.adapters.torch.parallel.parallel_plan import ParallelPlan, present
from hpctrain.worker.adapters.torch.refusals import SINCE_2_13
from hpctrain.worker.comm import Communicator, current

_WATCHDOG_SECONDS = 10


def mesh(**sizes: int) -> DeviceMesh:
    """The mesh of the run's ranks as torch's DeviceMesh, with dimensions named dp_replicate, dp_shard, pp, cp and tp.

    ``ht.shard`` and ``ht.distribute`` use it from then on. Collective at the first call with these sizes::

        mesh = ht.mesh(dp_shard=2, tp=2)
        tp_group = mesh["tp"].get_group()

    Args:
        sizes: ranks along each axis; -1 takes the ranks that the others leave, and without it dp_replicate does. By
            default those of ``hpctrain run --mesh``, or else all ranks replicate.

    Raises:
        HpctrainError: an unknown axis, sizes that do not fit the number of ranks, or a backend that
            torch.distributed cannot use.
    """
    comm = current()
    if sizes:
        given = parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items()), "ht.mesh")
        if VERIFY.read() and comm.size == 1:
            given = Mesh()  # What the ranks of the mesh compute is compared with one process.
        given.at(comm.size)
        set_mesh(comm, given)
    return device_mesh(comm, mesh_of(comm))


def device_mesh(comm: Communicator, mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of a mesh over a communicator's ranks. Collective at the first call with these sizes.

    Raises:
        HpctrainError: this PyTorch is too old for models that are divided.
    """
    # FSDP2 and DTensor of earlier ones lack what is replaced and read here.
    if not SINCE_2_13:
        raise HpctrainError(
            "HT-torch-version-unfit",
            "a mesh needs PyTorch 2.13, and this one is {version}",
            "pip install torch==2.13.0; or train without a mesh, or with torch's own fully_shard in the script",
            version=torch.__version__,
        )
    sizes = tuple(mesh.at(comm.size).sizes.values())
    made = comm.part("meshes", dict[tuple[int, ...], DeviceMesh])
    if sizes not in made:
        comm.process_group()
        say_when_pickled(comm)
        options = _options(comm)
        # One process alone is where its script has put the model.
        on_gpu = comm.backend == "nccl" or (comm.backend == "single" and torch.cuda.is_initialized())
        whole = init_device_mesh(
            "cuda" if on_gpu else "cpu",
            sizes,
            mesh_dim_names=tuple(AXES),
            backend_override=dict.fromkeys(AXES, options) if options else None,
        )
        meshes = [whole]
        if whole["tp"].size() > 1:
            # For sums over both axes, such as the norm of gradients: DTensor warns if this mesh does not exist.
            meshes.append(whole["dp_shard", "tp"]._flatten(backend_override=options))
        if comm.backend == "nccl":
            for each in meshes:
                _limit_waits(each)
        made[sizes] = whole
    return made[sizes]


def sizes_of(mesh: DeviceMesh) -> dict[Axis, int]:
    """The ranks along each axis of a mesh that :func:`device_mesh` made."""
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != tuple(AXES):
        names = getattr(mesh, "mesh_dim_names", type(mesh).__name__)
        raise HpctrainError(
            "HT-mesh-not-valid",
            "this mesh has the dimensions {names}, not {valid}",
            "mesh = ht.mesh(dp_shard=2, tp=2)",
            names=names,
            valid=", ".join(AXES),
        )
    return dict(zip(AXES, mesh.shape, strict=True))


def _options(comm: Communicator) -> tuple[str, Backend.Options] | None:
    """Options with hpctrain's time limit for Gloo, whose sends and receives keep the limit of their group's creation.

    PyTorch's own limit for the groups of a mesh is half an hour.
    """
    limit = timedelta(seconds=TIMEOUT.read())
    return ("gloo", Backend.Options("gloo", limit)) if comm.backend == "gloo" else None


def _limit_waits(mesh: DeviceMesh) -> None:
    for group in mesh.get_all_groups():
        # NCCL's watchdog ends the process without naming what hangs, so it comes after what does.
        _set_pg_timeout(timedelta(seconds=TIMEOUT.read() + _WATCHDOG_SECONDS), group)


def say_when_pickled(comm: Communicator) -> None:
    """From now on, warn once on this rank when it pickles its part of a tensor, as ``torch.save`` does.

    Not an error: every rank may write a file of its own, for as many ranks to read. torch.distributed.checkpoint and
    ``full_state_dict`` pickle no such tensor.
    """
    if DTensor.__reduce_ex__ is not torch.Tensor.__reduce_ex__ or comm.size == 1:
        return
    name = f"rank {comm.rank} on {comm.host}"
    unsaid = [True]

    def reduce(tensor: DTensor, protocol: Any) -> Any:
        if unsaid and any(placement.is_shard() for placement in tensor.placements):
            unsaid.clear()
            tell(
                f"hpctrain: {name} pickles its part of a sharded tensor ({tuple(tensor.to_local().shape)} of "
                f"{tuple(tensor.shape)}), as torch.save does: a file of rank 0 lacks the other ranks' parts. Save with "
                "torch.distributed.checkpoint; or call get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)) on all ranks and save what rank 0 gets (docs/"
                "resuming.md)"
            )
        return torch.Tensor.__reduce_ex__(tensor, protocol)  # type: ignore[no-untyped-call]

    DTensor.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]


def divide(module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, *, keep: bool) -> None:
    """Divide a model, or a stage of one, whose parameters are equal on all ranks.

    Args:
        keep: whether to keep gathered parameters up to the backward pass, whatever the plan's stage of ZeRO.
    """
    sizes = sizes_of(mesh)
    if sizes["tp"] > 1:
        parallelise_tensors(module, mesh["tp"], plan.tensor)
    recompute(module, plan)
    if sizes["dp_replicate"] * sizes["dp_shard"] == 1 and plan.precision is None:
        return
    axes: Any = ("dp_replicate", "dp_shard") if sizes["dp_replicate"] > 1 else "dp_shard"
    reduced_in = None if plan.precision is None else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=plan.precision, reduce_dtype=reduced_in)
    settings: dict[str, Any] = {"mesh": mesh[axes], "mp_policy": precision}
    modules = dict(module.named_modules())
    units = [name for name in modules if name and name in present(modules, plan.shard)]
    _check_ties(module, units)
    # From the inside out: each unit takes the parameters that no unit within it has taken.
    for name in reversed(units):
        fully_shard(modules[name], reshard_after_forward=plan.zero == 3 and not keep, **settings)
    # None is PyTorch's default: keep the root's parameters, which the backward pass needs first.
    fully_shard(module, reshard_after_forward=None if plan.zero == 3 and not keep else False, **settings)


def recompute(module: nn.Module, plan: ParallelPlan) -> None:
    """Have the activations of the plan's modules computed again in the backward pass."""
    modules = dict(module.named_modules())
    for name in present(modules, plan.recompute):
        part = modules[name]
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _check_ties(module: nn.Module, units: list[str]) -> None:
    """Refuse a parameter of two units: each parameter is gathered with one, and the other would lose it."""
    for names in tied_names(module):
        owners = {next((unit for unit in reversed(units) if name.startswith(f"{unit}.")), "") for name in names}
        if len(owners) > 1:
            raise HpctrainError(
                "HT-parallel-plan-not-valid",
                "{names} are one parameter, but the plan's shard names only some of the modules that have it",
                "leave the modules that share it out of shard: they are gathered with the whole model",
                names=" and ".join(map(repr, names)),
            )


def groups_of(root: nn.Module) -> list[FSDPParamGroup]:
    """The parameters that FSDP2 gathers and reduces together, in one order on all ranks.

    Args:
        root: the module to which ``fully_shard`` was applied last.
    """
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    # Otherwise the first part that is called becomes a root itself, and the model cannot be called any more.
    state._lazy_init()
    return [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters, which FSDP2 would keep in place of this rank's parts without a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def parallelise_tensors(model: nn.Module, mesh: DeviceMesh, tensor: Mapping[str, ParallelStyle]) -> None:
    """Divide a model's layers over a 1-D mesh, on whose ranks it is equal. Names that it lacks are skipped."""
    ties = tied_names(model)
    modules = dict(model.named_modules())
    for pattern, style in tensor.items():
        if present(modules, [pattern]):
            # The ranks are equal already, so nothing is sent.
            parallelize_module(model, mesh, {pattern: style}, src_data_rank=None)
    _replicate_rest(model, mesh)
    _tie_again(model, ties)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Share parameters again: parallelize_module has given each module one of its own."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            given = model.get_parameter(name)
            if given.placements != kept.placements:  # type: ignore[attr-defined]
                refuse_tie(first, name)
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).register_parameter(attribute, kept)


def refuse_tie(first: str, other: str) -> NoReturn:
    """Raise HpctrainError for two modules that share a parameter, which the plan divides in two ways."""
    raise HpctrainError(
        "HT-parallel-plan-not-valid",
        "{first!r} and {other!r} are one parameter, which the plan divides in two ways",
        "divide both along the same dimension (RowwiseParallel of an embedding, ColwiseParallel of a linear layer), or "
        "give each a parameter of its own",
        first=first,
        other=other,
    )


def _replicate_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        whole = {name: each for name, each in module.named_parameters(recurse=False) if not isinstance(each, DTensor)}
        for name, parameter in whole.items():
            replica = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(replica, requires_grad=parameter.requires_grad))
        if whole:
            compute = _Whole(list(whole))
            module.register_forward_pre_hook(compute.begin)
            module.register_forward_hook(compute.end, always_call=True)


class _Whole:
    """Lets a module compute with plain tensors in place of its parameters, which are whole on every rank of tp.

    Its gradients are then equal on all of them, as its inputs are.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def begin(self, module: nn.Module, _: Any) -> None:
        for name in self._names:
            parameter = cast(DTensor, module._parameters[name])
            # An object's own dictionary takes precedence over nn.Module's parameters.
            module.__dict__[name] = parameter.to_local(grad_placements=[Replicate()])

    def end(self, module: nn.Module, *_: Any) -> None:
        for name in self._names:
            module.__dict__.pop(name, None)
