"""What the traffic of each axis of a mesh gets of a fabric's links, under hpctrain's layout of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.recipes.mesh import Axis, Pipeline, Sharding
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.control.predict.network import share_of
from hpctrain.control.topology.mesh_flows import groups, mesh_bytes, mesh_flows
from hpctrain.control.topology.mesh_layout import MeshLayout
from hpctrain.control.topology.placement import Rings
from hpctrain.control.topology.routes import Phase

if TYPE_CHECKING:
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.network import Network
    from hpctrain.control.predict.transformers.layout import Layout


@dataclass(frozen=True)
class AxisShares:
    """The shares of the adapters' rate on the hosts of a fabric, with ``local`` ranks each."""

    transformer: Transformer
    sequence: int
    network: Network
    local: int
    _found: dict[object, Mapping[Axis, float]] = field(default_factory=dict)

    def of(self, layout: Layout) -> Mapping[Axis, float]:
        """Of each axis that goes over several hosts: the slowest flow's share.

        Hosts are in the order in which ``hpctrain plan`` would lay the mesh over them. What it decides by, the bytes of
        each axis, is counted once for all layouts of a mesh whose axes are in the same order by their bytes.
        """
        work = self._work(layout)
        sent = mesh_bytes(work)
        key = layout.mesh, layout.schedule, tuple(sorted(sent, key=sent.__getitem__))
        if key not in self._found:
            self._found[key] = self._shares(layout, work)
        return self._found[key]

    def _work(self, layout: Layout) -> MeshWork:
        network, cut = self.transformer, layout.sizes["pp"] > 1
        model = MeshModel(
            parameters=network.parameters.total,
            layers=network.layers,
            width=network.width,
            sequence=self.sequence,
            samples=layout.global_batch / layout.mesh.data_ranks,
            parts=1 if cut else layout.micro_batches,
            parameter_bytes=layout.item_bytes,
            gradient_bytes=layout.state.gradients,
            activation_bytes=layout.item_bytes,
        )
        sharding = Sharding(zero=3 if layout.zero == 3 else 1, recompute=layout.recomputation == "full")
        return MeshWork(mesh=layout.mesh, model=model, sharding=sharding, pipeline=Pipeline(schedule=layout.schedule))

    @cached_property
    def _rings(self) -> Rings:
        assert self.network.placed is not None
        return Rings(self.network.placed.routes.fabric, self.network.placed.hosts)

    def _shares(self, layout: Layout, work: MeshWork) -> Mapping[Axis, float]:
        placed, hosts = self.network.placed, np.arange(self.network.hosts)
        assert placed is not None
        laid = MeshLayout(self._rings, layout.mesh, mesh_flows(work), [self.local] * len(hosts))
        position, rail = laid.places(laid.best([hosts, *laid.along_axes(hosts)]))
        adapters = placed.adapters[position, rail * placed.adapters.shape[1] // self._rings.adapters.shape[1]]
        found: dict[Axis, float] = {}
        for axis in layout.sizes:
            source, target = self._neighbours(layout, axis)
            away = position[source] != position[target]
            if away.any():
                phase = Phase(source=adapters[source[away]], target=adapters[target[away]], share=1.0)
                found[axis] = share_of(placed.routes, phase, self.network.rail_bytes_per_s)
        return found

    def _neighbours(self, layout: Layout, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """Ranks that send to others along an axis at the same time: each of a host to one of the next host."""
        sizes = layout.sizes
        members = groups(layout.mesh, (axis, "cp") if axis == "dp_shard" else (axis,))
        if axis == "pp":
            return members[:, :-1].ravel(), members[:, 1:].ravel()
        inner = {"tp": 1, "cp": sizes["tp"], "dp_shard": sizes["tp"] * sizes["pp"]}
        stride = inner.get(axis, sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp_shard"])
        here = max(1, min(members.shape[1], self.local // stride))
        return members.ravel(), np.roll(members, -here, axis=1).ravel()
