"""The benchmarks' networks under meshes."""

from __future__ import annotations

from typing import Literal

from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import data_place, set_mesh
from hpctrain.worker.adapters.torch.parallel import ParallelPlan
from hpctrain.worker.bench.workloads import Workload, workload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.models.torch_gpt import tensor_plan

# The classes of modules whose parameters are gathered together, and whose activations are computed again.
_BLOCKS = {"gpt": ["Block"], "transformer": ["TransformerEncoderLayer"], "resnet50": ["Bottleneck"]}


def plan_of(model: str, *, zero: Literal[1, 2, 3] = 3, recompute: bool = False) -> ParallelPlan:
    """How a network of the benchmarks is divided."""
    blocks = _BLOCKS.get(model, [])
    tensor = tensor_plan() if model == "gpt" else {}
    return ParallelPlan(shard=blocks, recompute=blocks if recompute else (), zero=zero, tensor=tensor)


def shared_workload(comm: Communicator, mesh: Mesh, model: str, *, batch: int, image_size: int) -> Workload:
    """A network with this rank's part of a batch, under a mesh that is the ranks' from then on.

    Args:
        batch: samples for each rank. Ranks that do not divide the samples have those of several, so that a step is of
            as many under every mesh.
    """
    set_mesh(comm, mesh)
    place = data_place(comm)
    return workload(model, batch=batch * comm.size // place.ranks, image_size=image_size, rank=place.rank)
