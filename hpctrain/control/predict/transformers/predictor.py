"""The figures of one transformer on one number of nodes, with GPUs or on the cores of hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.constants import Constant, constants
from hpctrain.control.predict.energy import FIGURES, Machines, Site, energy
from hpctrain.control.predict.memory import most_samples
from hpctrain.control.predict.prediction import SWITCH_PORTS, Cause, Node, Row, causes_of
from hpctrain.control.predict.transformers.axis_shares import AxisShares
from hpctrain.control.predict.transformers.cpu_hosts import Hosts
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.memory import RankMemory, memory
from hpctrain.control.predict.transformers.rates import System, step_constants, step_file
from hpctrain.control.predict.transformers.search import Candidate, require_fitting, search
from hpctrain.control.predict.transformers.step import StepTime, predict_step
from hpctrain.control.predict.values import Estimate, Values, drawn, estimate
from hpctrain.control.topology.fabric import Floats

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network
    from hpctrain.control.predict.transformers.prediction import LanguageTraining

# Terms of a step in which ranks wait for each other's bytes, and in which they compute.
_TRAFFIC = ("tensor", "context", "sharding", "pipeline", "replicas")
_COMPUTING = ("matmul", "attention", "memory", "recomputation", "head", "update")


@dataclass(frozen=True)
class Predictor:
    """One training on one number of nodes."""

    training: LanguageTraining
    node: Node
    network: Network
    site: Site

    @property
    def ranks(self) -> int:
        return self.network.hosts * self.node.local

    @cached_property
    def memory_bytes(self) -> float:
        """Of a rank; what a host has is not known."""
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
        step = candidate.step
        return Estimate(value=step.seconds, low=step.low, high=step.high)

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
        """What matters most for the step's time: one standard deviation of what was expected of each constant."""
        known, found = step_constants(), {}
        for name, each in step_file().constants.items():
            if each.spread:
                moved = self.step(best.layout, best.software, {**known, name: known[name] * math.exp(each.spread)})
                found[name] = math.log(moved.seconds / best.step.seconds)
        whole = max(sum(slope**2 for slope in found.values()), 1e-30)
        causes = [Cause(name=name, share=slope**2 / whole, step=abs(slope)) for name, slope in found.items()]
        return tuple(sorted(causes, key=lambda cause: -cause.share))

    @property
    def constants(self) -> dict[str, Constant]:
        """All that the figures depend on."""
        of_step = {
            name: Constant(value=each.value, unit=each.unit, spread=each.spread, kind="published", source=each.source)
            for name, each in step_file().constants.items()
        }
        return {name: self.values.constants[name] for name in sorted(self.values.used)} | of_step


@dataclass(frozen=True)
class HostPredictor(Predictor):
    """The same on the cores of hosts, whose constants are drawn."""

    hosts: Hosts
    _drawn: dict[Layout, Floats] = field(default_factory=dict, init=False)

    @cached_property
    def shares(self) -> None:
        """The rings of all hosts count, by which the engines of hosts are predicted."""
        return

    @cached_property
    def memory_bytes(self) -> float:
        return math.inf

    @cached_property
    def system(self) -> System:
        return self.hosts.system(self.network)

    @property
    def values(self) -> Values:
        return self.hosts.values

    def trained(self, layout: Layout) -> tuple[Layout, str]:
        return self.training.trained(layout, on_gpus=False)

    def drawn(self, candidate: Candidate) -> Floats:
        """Seconds of a step, (columns,), drawn once for each layout."""
        training, layout = self.training, candidate.layout
        if layout not in self._drawn:
            steps = [
                predict_step(
                    training.network,
                    layout,
                    self.hosts.system(self.network, column),
                    software=candidate.software,
                    sequence=training.sequence,
                )
                for column in range(self.values.columns)
            ]
            self._drawn[layout] = np.array([step.seconds for step in steps])
        return self._drawn[layout]

    def seconds(self, candidate: Candidate) -> Estimate:
        return estimate(self.drawn(candidate))

    def memory_figures(self, held: RankMemory, layout: Layout) -> dict[str, Any]:
        """Of tensors alone: neither CUDA nor NCCL is there, and what a host has is not known."""
        whole = held.allocated
        return {
            "memory_bytes": Estimate(value=whole, low=whole, high=held.reserved),
            "largest_batch": None,
            "memory_choices": self.choices(layout, held),
            "memory_terms": held.tensors,
        }

    def energy(self, step: StepTime, samples: Estimate, seconds: float | None) -> dict[str, Any]:
        return dict.fromkeys(FIGURES)

    def causes(self, best: Candidate) -> tuple[Cause, ...]:
        return causes_of(self.values, self.drawn(best))

    @property
    def constants(self) -> dict[str, Constant]:
        return {name: self.values.constants[name] for name in sorted(self.values.used)}


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
