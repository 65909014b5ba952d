"""torch's DeviceMesh over the ranks of a run, and a warning where a script saves one rank's part of a tensor on it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import AXES, Axis, Mesh, parse_mesh
from hpctrain.common.settings import TIMEOUT, VERIFY
from hpctrain.common.stderr import tell
from hpctrain.worker.adapters.data_ranks import mesh_of, set_mesh
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.process_group import require_default_group

_WATCHDOG_MARGIN = timedelta(seconds=10)


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
        HpctrainError: the sizes do not fit the number of ranks, or the backend is one that torch.distributed cannot
            use.
    """
    sizes = tuple(mesh.at(comm.size).sizes.values())
    made = comm.part("meshes", dict[tuple[int, ...], DeviceMesh])
    if sizes not in made:
        require_default_group(comm)
        say_when_pickled(comm)
        options = _options(comm)
        with comm.group_creation():
            whole = init_device_mesh(
                "cuda" if comm.backend == "nccl" else "cpu",
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
    """The ranks along each axis of a mesh that :func:`device_mesh` made.

    Raises:
        HpctrainError: it has other dimensions.
    """
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
    return ("gloo", Backend.Options("gloo", _limit())) if comm.backend == "gloo" else None


def _limit_waits(mesh: DeviceMesh) -> None:
    for group in mesh.get_all_groups():
        # NCCL's watchdog ends the process without naming what hangs, so it comes after what does.
        _set_pg_timeout(_limit() + _WATCHDOG_MARGIN, group)


def _limit() -> timedelta:
    return timedelta(seconds=TIMEOUT.read())


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
