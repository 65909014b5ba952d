"""Makes a PyTorch model and its optimizer use a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import mesh_of
from hpctrain.worker.adapters.torch.broadcast import start_from_rank_0
from hpctrain.worker.adapters.torch.reducer import GradientReducer
from hpctrain.worker.adapters.torch.refusals import check_model, check_optimizer
from hpctrain.worker.adapters.torch.steps import step_recorder, watch_steps
from hpctrain.worker.adapters.torch.synced_batch_norm import synchronise_batch_norms
from hpctrain.worker.adapters.torch.trainable import Divided, Settings, Trained, add_modules, record_of, reducers_of
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.engines import Compression, wire_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.worker.adapters.torch.parallel.division import Division
    from hpctrain.worker.adapters.torch.parallel.parallel_plan import ParallelPlan

Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])
ModelT = TypeVar("ModelT", bound=torch.nn.Module)
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def distribute(
    model: ModelT,
    optimizer: Optimizers,
    *,
    comm: Communicator | None = None,
    bucket_mb: float | None = None,
    compression: Compression = "none",
    guard_every: int = 100,
    mesh: DeviceMesh | None = None,
    plan: ParallelPlan | None = None,
) -> tuple[ModelT, Optimizers]:
    """Make ``backward()`` leave the mean gradient over all ranks in ``parameter.grad``.

    The model and optimizer returned are the ones passed in, with their classes and arguments unchanged; every rank
    starts from rank 0's parameters, buffers and optimizer state. The model computes this rank's rows of the batches of
    :func:`hpctrain.shard`, and returns batches. Layers that are unfrozen, added or replaced later are taken before the
    next forward pass, with rank 0's values; an optimizer made later needs nothing. After converting or moving the
    model, call this function again. As in DistributedDataParallel with
    ``gradient_as_bucket_view``, ``parameter.grad`` can lie in a buffer that the next backward pass writes again: clone
    a gradient that you keep. With the backend mpi that buffer is gone after :func:`hpctrain.shutdown`: parameters then
    get copies of their gradients, and a tensor taken from ``parameter.grad`` earlier must not be used. Synchronised
    batch norms (``nn.SyncBatchNorm.convert_sync_batchnorm``) normalise over all ranks, on each engine.

    Args:
        model: the same on every rank.
        optimizer: one, or a list of several.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        bucket_mb: gradients are reduced in groups of about this many MB (10^6 bytes); by default 25, and 4 or more
            between hosts over hpctrain's own engine, ``mpi``, without RDMA.
        compression: the gradients' type on the wire. In fp16 their sum over the ranks must stay below 65504, with the
            backend mpi only their mean, and the share of each node in it: it adds up in float32.
        guard_every: steps between two checks that ranks hold equal parameters.
        mesh: what :func:`hpctrain.mesh` returned; by default the mesh of the run.
        plan: how the model is divided over the mesh.

    Where the mesh divides the model, its parameters and the optimizer's become DTensors, and PyTorch's FSDP2 reduces
    gradients; ``bucket_mb`` then has no effect, and the guard compares what several ranks hold in common.

    Raises:
        HpctrainError: no model or no optimizer, one that something else already parallelises, ranks with different
            models, or a wrong setting.
    """
    optimizers = _optimizers(model, optimizer)
    check_model(model)
    for each in optimizers:
        check_optimizer(each)
    if not (bucket_mb is None or bucket_mb > 0):
        raise HpctrainError("HT-argument-not-valid", "bucket_mb={bucket_mb:g} must be above 0", bucket_mb=bucket_mb)
    comm = comm or current()
    bucket_bytes = comm.bucket_bytes if bucket_mb is None else bucket_mb * 1e6
    wire = wire_of(compression, _TYPES)
    division = _division(comm, model, optimizers, mesh, plan, wire, guard_every)
    start_from_rank_0(comm, model, optimizers)
    synchronise_batch_norms(comm, model)
    if division is None or not division.divides_model:
        settings = Settings(bucket_bytes=bucket_bytes, wire=wire, guard_every=guard_every)
        _attach_reducers(comm, model, optimizers, settings)
    if division is not None:
        division.apply()
        if division.divides_model:
            add_modules(model, Divided(comm, model))
    return model, optimizer


def _division(
    comm: Communicator,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
    plan: ParallelPlan | None,
    wire: torch.dtype | None,
    guard_every: int,
) -> Division | None:
    """How the mesh divides the model; None where nothing but replicas was asked for."""
    if mesh is None and plan is None and mesh_of(comm).replicates_only:
        return None
    from hpctrain.worker.adapters.torch.parallel.division import Division

    division = Division(comm, model, optimizers, mesh, plan, guard_every=guard_every)
    if division.divides_model and wire is not None:
        raise HpctrainError(
            "HT-compression-of-divided-model",
            "compression is for ranks that replicate the whole model, and this mesh divides it",
            'choose compression="none"; precision=torch.bfloat16 in the plan sends parameters in 16 bits',
        )
    return division


def _attach_reducers(
    comm: Communicator,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    settings: Settings,
) -> None:
    """Reduce the gradients that no earlier call took, guard the parameters, and watch the steps."""
    for reducer in reducers_of(model):
        if reducer.comm is not comm:
            raise HpctrainError(
                "HT-model-of-other-communicator",
                "{model}, or a part of it, was given to ht.distribute before ht.shutdown(), or with another comm",
                "make a new model, load this one's state_dict() into it, and distribute that",
                exit_code=1,
                model=type(model).__name__,
            )
        if reducer.changed:
            reducer.rebuild()
    record = record_of(model) or Trained(comm, model, settings)
    record.add(optimizers)
    add_modules(model, record)
    if record.take(equal=True):
        record.lead(optimizers)
        record.note = step_recorder(comm, model, settings.bucket_bytes / 1e6)
    watch_steps()


def _optimizers(model: object, optimizer: object) -> list[torch.optim.Optimizer]:
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if not isinstance(model, torch.nn.Module) or not optimizers or len(optimizers) < len(given):
        raise HpctrainError(
            "HT-argument-not-valid",
            "{model} and {optimizer} are not a torch.nn.Module and a torch.optim.Optimizer, or several",
            "ht.distribute(model, optimizer)",
            model=type(model).__name__,
            optimizer=", ".join(type(each).__name__ for each in given) or "no optimizer",
        )
    return optimizers


def statistics(model: torch.nn.Module) -> GradientReducer:
    """The reducer of a model, for its ``communication_seconds``."""
    for reducer in reducers_of(model):
        return reducer
    raise HpctrainError("HT-model-not-distributed", "this model was not given to ht.distribute")
