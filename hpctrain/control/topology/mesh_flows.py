"""The bytes that the ranks of a mesh send each other in a training step, along each axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.common.recipes.mesh import AXES, Axis, Mesh
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.control.topology.fabric import Floats, Ints
from hpctrain.control.topology.placement import Order

# The model of Narayanan et al. 2021, arXiv 2104.04473, table 1, that is trained with tp 8 and pp 4: 60 layers of width
# 10240, batches of 1792 samples of 2048 tokens; settings in NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh. The
# element types are torchtitan's: gradients are reduced in float32, all else travels in bf16.
_PUBLISHED = MeshModel(
    parameters=76.1e9, layers=60, width=10240, sequence=2048, parameter_bytes=2, gradient_bytes=4, activation_bytes=2
)
_PUBLISHED_BATCH = 1792


def published_work(mesh: Mesh) -> MeshWork:
    """A mesh with the published model of 76.1 billion parameters, for questions without a recipe."""
    return MeshWork(mesh=mesh, model=replace(_PUBLISHED, samples=_PUBLISHED_BATCH / mesh.data_ranks))


# The stages per rank of schedules with several: the minimum of torch.distributed.pipelining.
_LOOPS = 2


@dataclass(frozen=True, kw_only=True)
class MeshFlows:
    """The bytes that ranks send in a step, from each source rank to the target rank at the same index.

    Attributes:
        ring: the number of ranks in each of the rings, whose flows come one ring after the other, in its order; 1 for
            flows that are none.
    """

    source: Ints
    target: Ints
    nbytes: Floats
    ring: int = 1

    @property
    def sent(self) -> float:
        """The most bytes that one rank sends."""
        return float(np.bincount(self.source, self.nbytes).max(initial=0.0))

    def over_rails(self, hosts: Order) -> MeshFlows:
        """The same where rings have several ranks on each of their hosts: these divide what goes to the next host.

        NCCL has a ring for each adapter, which leaves a host where it came in (``NCCL_CROSS_NIC=0``,
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), so that each rank sends its part to the one
        at its own place on the next host. Rings that do not have equally many ranks on each host stay as they are.

        Args:
            hosts: of each rank.
        """
        members = self.source.reshape(-1, self.ring)
        leaving = hosts[members] != np.roll(hosts[members], -1, axis=1)
        here = self.ring // max(1, int(leaving[0].sum()))
        if here == 1 or (leaving != (np.arange(1, self.ring + 1) % here == 0)).any():
            return self
        inside = ~leaving.ravel()
        return MeshFlows(
            source=np.concatenate([self.source[inside], self.source]),
            target=np.concatenate([self.target[inside], np.roll(members, -here, axis=1).ravel()]),
            nbytes=np.concatenate([self.nbytes[inside], self.nbytes / here]),
        )


def mesh_flows(work: MeshWork) -> dict[Axis, MeshFlows]:
    """The flows along each axis with several ranks; 1 byte to each neighbour where the model is not known.

    FSDP's groups are those along dp_shard and cp together, as ranks along cp have the same parameters and other tokens
    (torchtitan, torchtitan/distributed/parallel_dims.py, ``dp_shard_cp``). They are listed under dp_shard.
    """
    found: dict[Axis, MeshFlows] = {}
    for axis, nbytes in mesh_bytes(work).items():
        if axis == "pp":
            found[axis] = pipeline_flows(work.mesh, nbytes, work.pipeline.schedule)
        else:
            found[axis] = ring_flows(work.mesh, next(axes for axes in _RINGS if axes[0] == axis), nbytes)
    return found


def mesh_bytes(work: MeshWork) -> dict[Axis, float]:
    """The bytes that a rank sends to a neighbour along each axis with several ranks; see :func:`mesh_flows`."""
    sizes = work.mesh.sizes
    nbytes_of = {
        axes[0]: 1.0 if work.model is None else nbytes(work, work.model)
        for axes, nbytes in _RINGS.items()
        if math.prod(sizes[axis] for axis in axes) > 1
    }
    if sizes["pp"] > 1:
        nbytes_of["pp"] = 1.0 if work.model is None else stage_bytes(work.model, sizes)
    return {axis: nbytes_of[axis] for axis in AXES if axis in nbytes_of}


def replicated_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of an all-reduce of gradients or their shards (Zhao et al. 2023, arXiv 2304.11277, section 3.2.2)."""
    ranks = work.mesh.sizes["dp_replicate"]
    return 2 * (ranks - 1) / ranks * _parameters(model, work.mesh.sizes) / _shards(work) * model.gradient_bytes


def sharded_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of FSDP, which gathers parameters for the forward pass, with ZeRO 3 once more for the backward pass,
    and reduces and scatters gradients (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).

    Stages of a pipeline gather once for all micro-batches. Where gradients are accumulated, each part gathers anew.
    """
    sizes, ranks = work.mesh.sizes, _shards(work)
    gathers = model.parts * (2 if work.sharding.zero == 3 and sizes["pp"] == 1 else 1)
    bytes_of_parameter = gathers * model.parameter_bytes + model.gradient_bytes
    return (ranks - 1) / ranks * _parameters(model, sizes) * bytes_of_parameter


def tensor_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of two all-reduces of the activations in a layer's forward pass, and two in its backward pass.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3. Sequence parallelism makes of each a gather and a scatter of as
    many bytes together (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Recomputation repeats those of the
    forward pass.
    """
    sizes = work.mesh.sizes
    ranks, allreduces = sizes["tp"], 6 if work.sharding.recompute else 4
    return allreduces * 2 * (ranks - 1) / ranks * stage_bytes(model, sizes) * model.layers / sizes["pp"]


def context_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of ring attention (Liu et al. 2023, arXiv 2310.01889).

    Keys and values travel round the ring to the last rank, in the forward pass and again in the backward pass, and
    their gradients return to the ranks that own them.
    """
    sizes = work.mesh.sizes
    passes = (3 if work.sharding.recompute else 2) * (sizes["cp"] - 1) + sizes["cp"]
    return passes * 2 * stage_bytes(model, sizes) / sizes["tp"] * model.layers / sizes["pp"]


_RINGS: Mapping[tuple[Axis, ...], Callable[[MeshWork, MeshModel], float]] = {
    ("dp_replicate",): replicated_bytes,
    ("dp_shard", "cp"): sharded_bytes,
    ("cp",): context_bytes,
    ("tp",): tensor_bytes,
}


def stage_bytes(model: MeshModel, sizes: Mapping[Axis, int]) -> float:
    """The bytes of the activations of all micro-batches that a rank sends to the next stage, and of the gradients that
    it gets back. Ranks along tp all send the whole activations, which each has between layers (Narayanan et al. 2021,
    arXiv 2104.04473, sections 2.2 and 4.1).
    """
    return model.samples * model.sequence / sizes["cp"] * model.width * model.activation_bytes


def _parameters(model: MeshModel, sizes: Mapping[Axis, int]) -> float:
    """The parameters of a rank: those of its stage, divided along tp."""
    return model.parameters / (sizes["tp"] * sizes["pp"])


def _shards(work: MeshWork) -> int:
    return work.mesh.sizes["dp_shard"] * work.mesh.sizes["cp"]


def groups(mesh: Mesh, axes: Sequence[Axis]) -> Ints:
    """The ranks of each group along some axes, in their order, (groups, members)."""
    sizes = list(mesh.sizes.values())
    ranks = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    last = [AXES.index(axis) for axis in axes]
    members = math.prod(sizes[axis] for axis in last)
    found: Ints = np.moveaxis(ranks, last, range(-len(last), 0)).reshape(-1, members)
    return found


def ring_flows(mesh: Mesh, axes: Sequence[Axis], nbytes: float) -> MeshFlows:
    """Every rank of each group sends ``nbytes`` to the next."""
    members = groups(mesh, axes)
    following = np.roll(members, -1, axis=1)
    sent = np.full(members.size, float(nbytes))
    return MeshFlows(source=members.ravel(), target=following.ravel(), nbytes=sent, ring=members.shape[1])


def pipeline_flows(mesh: Mesh, nbytes: float, schedule: str) -> MeshFlows:
    """Activations from each stage to the next, and gradients back, where the two are on different ranks."""
    members = groups(mesh, ("pp",))
    stages = np.array(stage_ranks(schedule, members.shape[1]))
    before, after = stages[:-1], stages[1:]
    elsewhere = before != after
    forward, backward = members[:, before[elsewhere]].ravel(), members[:, after[elsewhere]].ravel()
    return MeshFlows(
        source=np.concatenate([forward, backward]),
        target=np.concatenate([backward, forward]),
        nbytes=np.full(2 * forward.size, float(nbytes)),
    )


def stage_ranks(schedule: str, ranks: int) -> list[int]:
    """The rank along pp of each stage.

    Sources: Narayanan et al. 2021, section 2.2 (interleaved); torch.distributed.pipelining, ``schedules.py``.
    """
    return list(range(ranks)) * (_LOOPS if schedule == "interleaved_1f1b" else 1)
