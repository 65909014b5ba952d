"""Predicts the training of a transformer, on a given mesh or on the best one of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import Axis, Pipeline, Sharding
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.control.predict.memory import RankMemory, most_samples
from hpctrain.control.predict.network import share_of
from hpctrain.control.predict.prediction import Node, Run
from hpctrain.control.predict.training import frozen_warnings
from hpctrain.control.predict.transformers.language_training import LanguageTraining
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.ranges import shipped_ranges, step_spreads
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import System, step_file
from hpctrain.control.predict.transformers.search import Search
from hpctrain.control.predict.transformers.step import Setup
from hpctrain.control.predict.values import Cause, Constant, Values, causes_by_size, evenly_drawn
from hpctrain.control.topology.mesh_flows import groups, mesh_bytes, mesh_flows
from hpctrain.control.topology.mesh_layout import MeshLayout
from hpctrain.control.topology.placement import Rings
from hpctrain.control.topology.routes import Phase

if TYPE_CHECKING:
    from hpctrain.common.recipes.transformer import Transformer
    from hpctrain.control.predict.network import Network
    from hpctrain.control.topology.fabric import Floats

# Terms of a step in which ranks wait for each other's bytes, and in which they compute.
_TRAFFIC = ("tensor", "context", "sharding", "pipeline", "replicas")
_COMPUTING = ("matmul", "attention", "memory", "recomputation", "head", "update")


@dataclass(frozen=True)
class LanguagePredictor:
    """One training on one number of nodes, on a given mesh or on the best one of all.

    Attributes:
        unstated: columns of ``ranges.yaml`` that are assumed.
    """

    training: LanguageTraining
    node: Node
    network: Network
    values: Values
    unstated: tuple[str, ...] = ()

    def runs(self, most: int) -> list[Run]:
        """The training by the fastest layouts, at most so many, the fastest first."""
        return [self._run(setup) for setup in self.setups[:most]]

    def alone(self, run: Run) -> Run:
        """The training on one node, which efficiency is against; as it is where the mesh does not fit into one."""
        if self.network.hosts > 1 and self.training.mesh is not None:
            with contextlib.suppress(HpctrainError):
                return replace(self, network=replace(self.network, hosts=1)).runs(1)[0]
        return run

    @property
    def ranks(self) -> int:
        return self.network.hosts * self.node.local

    @cached_property
    def system(self) -> System:
        network, local = self.network, self.node.local
        rate = network.rails * network.rail_bytes_per_s / local
        shares = self.shares
        return System.of(
            self.node.gpu,
            gpus_per_node=local,
            network_bytes_per_s=rate if shares else rate * network.ring_share,
            shares=shares.of if shares else None,
        )

    @cached_property
    def shares(self) -> AxisShares | None:
        """What each axis gets of the fabric's links; None without a fabric, where no link is shared."""
        network, training = self.network, self.training
        if network.placed is None or network.hosts == 1:
            return None
        return AxisShares(training.network, training.sequence, network, self.node.local)

    @cached_property
    def setups(self) -> Sequence[Setup]:
        """The layouts, the fastest first; of a given mesh the only one, whether it fits the memory or not."""
        training = self.training
        if training.mesh is not None:
            layout, software = training.trained(training.layout(self.ranks))
            return [Setup(training.network, layout, self.system, software, training.sequence)]
        return Search(
            network=training.network,
            system=self.system,
            ranks=self.ranks,
            global_batch=training.batch(self.ranks),
            memory_bytes=gpu(self.node.gpu).memory_bytes,
            base=training.searched,
            of_recipe=training.recipe is not None,
            trained=training.trained,
            runs=training.runs,
            sequence=training.sequence,
        ).fitting()

    def _run(self, best: Setup) -> Run:
        """The training by a layout."""
        layout, step, training = best.layout, best.step, self.training
        half_width = shipped_ranges().half_width(self._spreads(best))
        total = step.seconds * np.exp(half_width * evenly_drawn(self.values.columns))

        def share(names: tuple[str, ...]) -> Floats:
            return np.full_like(total, min(1.0, sum(step.terms.get(name, 0.0) for name in names) / step.seconds))

        record = layout_record(layout)
        if self.shares:
            record["network_shares"] = dict(self.shares.of(layout))
        return Run(
            node=self.node,
            network=self.network,
            batch=layout.global_batch,
            data_ranks=layout.mesh.data_ranks,
            batch_per_gpu=layout.global_batch / self.ranks,
            at_once=layout.micro_batch,
            total=total,
            tokens=training.sequence,
            waits=share(_TRAFFIC),
            busy=share(_COMPUTING),
            length=training.length(layout, total),
            figures={"layout": record, "step_terms": dict(step.terms), "limited_by": step.bound}
            | self._memory_figures(best.memory, layout),
        )

    def _spreads(self, best: Setup) -> dict[str, float]:
        return step_spreads(best, self.unstated if self.network.hosts > 1 else ())

    def _memory_figures(self, held: RankMemory, layout: Layout) -> dict[str, Any]:
        """The figures of a row about memory, as nvidia-smi shows it."""

        def fits(batch: int) -> bool:
            changed = replace(layout, micro_batch=batch)
            needed = memory(self.training.network, changed, sequence=self.training.sequence)
            return needed.fits(gpu(self.node.gpu).memory_bytes)

        other = {"fragmentation": held.fragmentation, "communication": held.communication}
        return {
            "memory_bytes": held.estimate(),
            "largest_batch": most_samples(fits),
            "memory_terms": {**held.tensors, **other},
        }

    def causes(self, run: Run) -> tuple[Cause, ...]:
        """What makes the range of a step as wide as it is."""
        return causes_by_size(self._spreads(self.setups[0]))

    def further_constants(self) -> dict[str, Constant]:
        """The constants of the step, and what its range comes from besides them, as constants of value 1."""
        ranges, found = shipped_ranges(), dict[str, Constant](step_file().constants)
        kinds = self.setups[0].kinds
        for name, spread in self._spreads(self.setups[0]).items():
            group, _, kind = name.partition(".")
            if name == "publishers.any":
                source = "by how much a new publisher's runs differ from those of others like them"
            elif group == "publishers":
                source = f"{ranges.count(kind, kinds[kind])} publishers have runs of this kind: {kinds[kind]}"
            elif group == "unstated":
                source = "not stated, and assumed"
            else:
                continue
            found[name] = Constant(value=1.0, unit="", spread=spread, kind="published", source=source)
        return found

    def warnings(self, runs: Sequence[Run]) -> Iterator[str]:
        """What is assumed about the last of the runs, which this predictor made."""
        training, batch = self.training, runs[-1].batch
        yield from self.network.warnings
        yield from frozen_warnings(training.recipe)
        if training.recipe is None and "batch" not in training.settings:
            tokens = batch * training.sequence / 1e6
            yield f"assumed about the batch: {batch} samples, {tokens:.3g} million tokens (--set batch=N)"
        if training.recipe is not None and training.recipe.data.epoch_samples is None:
            yield "how long the run takes is not known, because the size of the data is not"


@dataclass(frozen=True)
class AxisShares:
    """What the traffic of each axis of a mesh gets of a fabric's links: shares of the adapters' rate, on hosts with
    ``local`` ranks each under hpctrain's layout of the mesh.
    """

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


def layout_record(layout: Layout) -> dict[str, Any]:
    """What a layout is, for JSON: the ranks of each axis and how they are used."""
    named = ["global_batch", "micro_batch", "micro_batches", "zero", "reshard", "sequence_parallel", "recomputation"]
    named += ["precision", *(["schedule", "virtual_stages"] if layout.sizes["pp"] > 1 else [])]
    return {**{str(axis): size for axis, size in layout.sizes.items()}, **{key: getattr(layout, key) for key in named}}
