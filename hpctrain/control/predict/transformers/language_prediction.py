"""Predicts the training of a transformer on each number of nodes, on a given mesh or on the best one of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.causes import causes_by_size
from hpctrain.control.predict.constants import Constant, constants
from hpctrain.control.predict.memory import RankMemory, fewer, most_samples
from hpctrain.control.predict.node_energy import Site
from hpctrain.control.predict.prediction import Length, Node, Prediction, Row, Run, idle_warnings, worthwhile
from hpctrain.control.predict.training import frozen_warnings
from hpctrain.control.predict.transformers.axis_shares import AxisShares
from hpctrain.control.predict.transformers.language_training import LanguageTraining
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.ranges import StepRange, shipped_ranges, step_range
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import System, step_file
from hpctrain.control.predict.transformers.search import Candidate, Search, candidate
from hpctrain.control.predict.values import Values, drawn, evenly_drawn

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network
    from hpctrain.control.topology.fabric import Floats

# Terms of a step in which ranks wait for each other's bytes, and in which they compute.
_TRAFFIC = ("tensor", "context", "sharding", "pipeline", "replicas")
_COMPUTING = ("matmul", "attention", "memory", "recomputation", "head", "update")
_MOST_CANDIDATES = 50


def predict_language(
    training: LanguageTraining,
    node: Node,
    networks: Sequence[Network],
    *,
    site: Site = Site(),
    unstated: tuple[str, ...] = (),
) -> Prediction:
    """Predict the training of a transformer on each number of nodes.

    Args:
        networks: one for each number of nodes, which rises.
        unstated: what was assumed, as columns of ``ranges.yaml``.

    Raises:
        HpctrainError: a GPU that does not have the precision, or a mesh that does not fit.
    """
    values = drawn(constants())
    predictors = [_Predictor(training, node, network, values, unstated) for network in networks]
    found = [predictor.candidates() for predictor in predictors]
    runs = [predictor.run(candidates[0]) for predictor, candidates in zip(predictors, found, strict=True)]
    reference = _reference(predictors[0], runs[0])
    rows = tuple(run.row(reference, values, site) for run in runs)
    last, best = predictors[-1], found[-1][0]
    spreads = last.range_of(best).spreads
    candidates: tuple[Row, ...] = ()
    if training.mesh is None:
        slower = (last.run(one).row(reference, values, site) for one in found[-1][1:_MOST_CANDIDATES])
        candidates = (rows[-1], *slower)
    idle = [
        run.network.hosts
        for run, candidates in zip(runs, found, strict=True)
        if candidates[0].layout.mesh.data_ranks > run.batch
    ]
    return Prediction(
        name=training.name,
        node=node,
        rows=rows,
        worthwhile=worthwhile([(row.nodes, row.samples_per_s.value) for row in rows]),
        causes=causes_by_size(spreads),
        warnings=(*_warnings(training, last.network, best.layout), *idle_warnings(idle)),
        candidates=candidates,
        constants={name: values.constants[name] for name in sorted(values.used)} | last.doubts(best, spreads),
    )


def _reference(first: _Predictor, run: Run) -> Floats:
    """Samples a second and node on one node; on the fewest that are predicted where the mesh does not fit into one."""
    if first.network.hosts > 1 and first.training.mesh is not None:
        alone = replace(first, network=replace(first.network, hosts=1))
        with contextlib.suppress(HpctrainError):
            run = alone.run(alone.candidates()[0])
    found: Floats = run.samples_per_s / run.network.hosts
    return found


def _warnings(training: LanguageTraining, network: Network, layout: Layout) -> Iterator[str]:
    yield from network.warnings
    yield from frozen_warnings(training.recipe)
    if training.recipe is None and training.settings.batch is None:
        tokens = layout.global_batch * training.sequence / 1e6
        yield f"assumed about the batch: {layout.global_batch} samples, {tokens:.3g} million tokens (--set batch=N)"
    if training.recipe is not None and training.recipe.data.epoch_samples is None:
        yield "how long the run takes is not known, because the size of the data is not"


@dataclass(frozen=True)
class _Predictor:
    """One training on one number of nodes.

    Attributes:
        values: of the energy's constants.
        unstated: columns of ``ranges.yaml`` that are assumed.
    """

    training: LanguageTraining
    node: Node
    network: Network
    values: Values
    unstated: tuple[str, ...]

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

    def candidates(self) -> Sequence[Candidate]:
        """The layouts, the fastest first; of a given mesh the only one, whether it fits the memory or not."""
        training = self.training
        if training.mesh is not None:
            layout, software = training.trained(training.layout(self.ranks))
            return [candidate(training.network, self.system, layout, software, training.sequence)]
        base, choices = training.searched
        return Search(
            network=training.network,
            system=self.system,
            ranks=self.ranks,
            global_batch=training.batch(self.ranks),
            memory_bytes=self.memory_bytes,
            base=base,
            choices=choices,
            trained=training.trained,
            runs=training.runs,
            sequence=training.sequence,
        ).require_fitting()

    def range_of(self, best: Candidate) -> StepRange:
        """What 8 of 10 steps are within."""
        return step_range(best, self.unstated if self.network.hosts > 1 else ())

    def held(self, layout: Layout) -> RankMemory:
        """The memory of the rank that needs most."""
        return memory(self.training.network, layout, sequence=self.training.sequence)

    def run(self, best: Candidate) -> Run:
        """The training by a layout."""
        layout, step, training = best.layout, best.step, self.training
        total = step.seconds * np.exp(self.range_of(best).half_width * evenly_drawn(self.values.columns))
        ones = np.ones(self.values.columns)
        steps = training.steps(layout)

        def share(names: tuple[str, ...]) -> Floats:
            return ones * min(1.0, sum(step.terms.get(name, 0.0) for name in names) / step.seconds)

        return Run(
            node=self.node,
            network=self.network,
            batch=layout.global_batch,
            batch_per_gpu=layout.global_batch / self.ranks,
            at_once=layout.micro_batch,
            total=total,
            tokens=training.sequence,
            waits=share(_TRAFFIC),
            busy=share(_COMPUTING),
            length=None
            if steps is None
            else Length(epochs=training.epochs * ones, source="the recipe's", seconds=steps * total),
            figures={
                "layout": layout_record(layout)
                | ({"network_shares": dict(self.shares.of(layout))} if self.shares else {}),
                "step_terms": dict(step.terms),
                "limited_by": step.bound,
                **self.memory_figures(best.memory, layout),
            },
        )

    def memory_figures(self, held: RankMemory, layout: Layout) -> dict[str, Any]:
        """The figures of a row about memory, as nvidia-smi shows it."""
        changed: dict[str, dict[str, Any]] = {
            "half the samples at once": {"micro_batch": max(1, layout.micro_batch // 2)},
            "recomputation of cheap operators": {"recomputation": "matmuls"},
            "recomputation of each layer": {"recomputation": "full"},
        }

        def fits(batch: int) -> bool:
            return self.held(replace(layout, micro_batch=batch)).fits(self.memory_bytes)

        choices = {name: self.held(replace(layout, **change)).used for name, change in changed.items()}
        other = {"fragmentation": held.fragmentation, "communication": held.communication}
        return {
            "memory_bytes": held.estimate(),
            "largest_batch": most_samples(fits),
            "memory_choices": fewer(held.used, choices),
            "memory_terms": {**held.tensors, **other},
        }

    def doubts(self, best: Candidate, spreads: Mapping[str, float]) -> dict[str, Constant]:
        """The constants of the step, and what its range comes from besides them, as constants of value 1."""
        ranges = shipped_ranges()
        kinds = best.kinds
        found: dict[str, Constant] = dict(step_file().constants)
        for name, spread in spreads.items():
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
