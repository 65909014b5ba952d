"""The figures of one transformer on one number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.causes import Cause, causes_by_size
from hpctrain.control.predict.constants import Constant, constants
from hpctrain.control.predict.image_prediction import SWITCH_PORTS, Node, Row
from hpctrain.control.predict.layer_memory import most_samples
from hpctrain.control.predict.node_energy import Machines, Site, energy
from hpctrain.control.predict.transformers.axis_shares import AxisShares
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.ranges import StepRange, kinds_of, shipped_ranges, step_range
from hpctrain.control.predict.transformers.rank_memory import RankMemory, memory
from hpctrain.control.predict.transformers.rates import System, step_file
from hpctrain.control.predict.transformers.search import Candidate, require_fitting, search
from hpctrain.control.predict.transformers.step import StepTime, predict_step
from hpctrain.control.predict.values import Estimate, Values, drawn, estimate

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network
    from hpctrain.control.predict.transformers.language_prediction import LanguageTraining

# Terms of a step in which ranks wait for each other's bytes, and in which they compute.
_TRAFFIC = ("tensor", "context", "sharding", "pipeline", "replicas")
_COMPUTING = ("matmul", "attention", "memory", "recomputation", "head", "update")


@dataclass(frozen=True)
class Predictor:
    """One training on one number of nodes.

    Attributes:
        unstated: columns of ``ranges.yaml`` that are assumed.
    """

    training: LanguageTraining
    node: Node
    network: Network
    site: Site
    unstated: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.network.hosts * self.node.local

    @cached_property
    def memory_bytes(self) -> float:
        """Of a rank."""
        return gpu(self.node.gpu).memory_bytes

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
    def values(self) -> Values:
        """Of the energy's constants."""
        return drawn(constants())

    def found(self) -> Sequence[Candidate]:
        """The candidates, the fastest first; of a given mesh the only one, whether it fits the memory or not."""
        training = self.training
        if training.mesh is not None:
            layout, software = self.trained(training.layout(self.ranks))
            return [
                Candidate(layout=layout, software=software, step=self.step(layout, software), memory=self.held(layout))
            ]
        base, choices = training.searched
        batch = training.batch(self.ranks)
        found = search(
            training.network,
            self.system,
            ranks=self.ranks,
            global_batch=batch,
            memory_bytes=self.memory_bytes,
            base=base,
            choices=choices,
            trained=self.trained,
            runs=training.runs,
            sequence=training.sequence,
        )
        require_fitting(found, gpu=self.node.gpu, ranks=self.ranks, global_batch=batch, memory_bytes=self.memory_bytes)
        return found.fitting

    def trained(self, layout: Layout) -> tuple[Layout, str]:
        """See :meth:`LanguageTraining.trained`."""
        return self.training.trained(layout)

    def seconds(self, candidate: Candidate) -> Estimate:
        """Of a step."""
        found = self.range_of(candidate)
        return Estimate(value=candidate.step.seconds, low=found.low, high=found.high)

    def range_of(self, candidate: Candidate) -> StepRange:
        """What 8 of 10 steps are within."""
        training = self.training
        return step_range(
            training.network,
            candidate.layout,
            self.system,
            software=candidate.software,
            sequence=training.sequence,
            unstated=self.unstated if self.network.hosts > 1 else (),
        )

    def memory_figures(self, held: RankMemory, layout: Layout) -> dict[str, Any]:
        """The figures of a row about memory, as nvidia-smi shows it."""
        spread = held.fragmentation
        return {
            "memory_bytes": Estimate(value=held.used, low=held.used - spread, high=held.used + spread),
            "largest_batch": self.largest(layout),
            "memory_choices": self.choices(layout, held),
            "memory_terms": {**held.tensors, "fragmentation": spread, "communication": held.communication},
        }

    def step(self, layout: Layout, software: str, values: Mapping[str, float] | None = None) -> StepTime:
        """The time of a step."""
        training = self.training
        return predict_step(
            training.network,
            layout,
            self.system,
            software=software,
            sequence=training.sequence,
            constants=values,
        )

    def held(self, layout: Layout) -> RankMemory:
        """The memory of the rank that needs most."""
        return memory(self.training.network, layout, sequence=self.training.sequence)

    def row(self, candidate: Candidate, reference: float) -> Row:
        """The figures of a layout.

        Args:
            reference: samples a second and GPU that efficiency is against.
        """
        layout, step, held = candidate.layout, candidate.step, candidate.memory
        seconds = self.seconds(candidate)
        samples = _inverse(seconds, layout.global_batch)
        efficiency = samples.value / self.ranks / reference
        waits = sum(step.terms.get(name, 0.0) for name in _TRAFFIC) / step.seconds
        minutes = self.training.minutes(layout, 1.0)
        return Row(
            nodes=self.network.hosts,
            gpus=self.ranks,
            batch_per_gpu=layout.global_batch / self.ranks,
            at_once=layout.micro_batch,
            step_s=seconds,
            samples_per_s=samples,
            tokens_per_s=samples.scaled(self.training.sequence),
            efficiency=_exactly(efficiency),
            weak_efficiency=_exactly(efficiency),
            communication_share=_exactly(waits),
            epochs=None if minutes is None else _exactly(self.training.epochs),
            epochs_source=None if minutes is None else "the recipe's",
            minutes=None if minutes is None else seconds.scaled(minutes),
            layout=layout_record(layout) | ({"network_shares": dict(self.shares.of(layout))} if self.shares else {}),
            step_terms=dict(step.terms),
            limited_by=step.bound,
            **self.memory_figures(held, layout),
            **self.energy(step, samples, None if minutes is None else 60 * minutes * step.seconds),
        )

    def largest(self, layout: Layout) -> int:
        """The most samples that a rank can compute at once."""
        return most_samples(lambda batch: self.held(replace(layout, micro_batch=batch)).fits(self.memory_bytes))

    def choices(self, layout: Layout, held: RankMemory) -> Mapping[str, int]:
        """Bytes with what would make them fewer."""
        changed: dict[str, dict[str, Any]] = {
            "half the samples at once": {"micro_batch": max(1, layout.micro_batch // 2)},
            "recomputation of cheap operators": {"recomputation": "matmuls"},
            "recomputation of each layer": {"recomputation": "full"},
        }
        found = {name: self.held(replace(layout, **change)).used for name, change in changed.items()}
        return {name: round(used) for name, used in found.items() if used < 0.999 * held.used}

    def energy(self, step: StepTime, samples: Estimate, seconds: float | None) -> dict[str, Any]:
        """The figures of a row about energy."""
        nodes, network = self.network.hosts, self.network
        busy = sum(step.terms.get(name, 0.0) for name in _COMPUTING) / step.seconds
        columns = np.full(self.values.columns, 1.0)
        machines = Machines(
            gpu=self.node.gpu,
            gpus_per_node=self.node.local,
            nodes=nodes,
            switch_ports=SWITCH_PORTS * network.rails * nodes if nodes > 1 else 0.0,
        )
        found = energy(
            self.values,
            machines,
            busy=columns * min(1.0, busy),
            seconds=None if seconds is None else columns * seconds,
            samples_per_s=columns * samples.value,
            site=self.site,
        )
        return {name: None if figure is None else estimate(figure) for name, figure in vars(found).items()}

    def causes(self, best: Candidate) -> tuple[Cause, ...]:
        """What the range of the step's time comes from."""
        return causes_by_size(self.range_of(best).spreads)

    def doubts(self, best: Candidate) -> dict[str, Constant]:
        """What the range comes from besides constants, as constants of value 1."""
        layout, software, ranges = best.layout, best.software, shipped_ranges()
        kinds = kinds_of(self.training.network, layout, self.system, software=software, sequence=self.training.sequence)
        found = {}
        for name, spread in self.range_of(best).spreads.items():
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

    def constants(self, best: Candidate) -> dict[str, Constant]:
        """All that the figures depend on."""
        of_step = {
            name: Constant(value=each.value, unit=each.unit, spread=each.spread, kind="published", source=each.source)
            for name, each in step_file().constants.items()
        }
        used = {name: self.values.constants[name] for name in sorted(self.values.used)}
        return used | of_step | self.doubts(best)


def layout_record(layout: Layout) -> dict[str, Any]:
    """What a layout is, for JSON: the ranks of each axis and how they are used."""
    found: dict[str, Any] = {str(axis): size for axis, size in layout.sizes.items()} | {
        "global_batch": layout.global_batch
    }
    named = ("micro_batch", "micro_batches", "zero", "reshard", "sequence_parallel", "recomputation", "precision")
    found |= {name: getattr(layout, name) for name in named}
    if layout.sizes["pp"] > 1:
        found |= {"schedule": layout.schedule, "virtual_stages": layout.virtual_stages}
    return found


def _exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _inverse(found: Estimate, of: float) -> Estimate:
    return Estimate(value=of / found.value, low=of / found.high, high=of / found.low)
