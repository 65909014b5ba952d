"""Predicts the training of a transformer on each number of nodes, on a given mesh or on the best one of all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.compatibility import require_compatible
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.requirements import require_micro_batches
from hpctrain.common.recipes.sections import Batch
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.constants import Constant, constants
from hpctrain.control.predict.energy import Machines, Site, energy
from hpctrain.control.predict.prediction import SWITCH_PORTS, Cause, Node, Prediction, Row, idle_warnings, worthwhile
from hpctrain.control.predict.training import compiled_on_gpus, epoch_steps
from hpctrain.control.predict.transformers.layout import Kernels, Layout
from hpctrain.control.predict.transformers.memory import RankMemory, memory
from hpctrain.control.predict.transformers.rates import System, step_constants, step_file
from hpctrain.control.predict.transformers.search import USABLE, Candidate, Choices, require_fitting, search
from hpctrain.control.predict.transformers.settings import Settings
from hpctrain.control.predict.transformers.step import StepTime, predict_step
from hpctrain.control.predict.values import Estimate, Values, drawn, estimate

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe
    from hpctrain.control.predict.network import Network

# Tokens of a step where nobody says how many: GPT-3's larger models had 2 to 3.2 million (Brown et al. 2020, table
# 2.1), Llama 2 and 3 had 4 (Touvron et al. 2023, section 2.2; Grattafiori et al. 2024, section 3.4).
_TOKENS = 2**22
_MOST_CANDIDATES = 50
_LARGEST = 1 << 16
# Terms of a step in which ranks wait for each other's bytes, and in which they compute.
_TRAFFIC = ("tensor", "context", "sharding", "pipeline", "replicas")
_COMPUTING = ("matmul", "attention", "memory", "recomputation", "head", "update")


@dataclass(frozen=True, kw_only=True)
class LanguageTraining:
    """The training of a transformer, before its number of ranks is known.

    Attributes:
        mesh: None to search for the best one.
        recipe: whose model it is; None for a transformer of its own.
        micro_batch: chooses the recipe's for a number of ranks, where it has ``auto``.
    """

    name: str
    network: Transformer
    settings: Settings
    mesh: Mesh | None
    recipe: Recipe | None = None
    micro_batch: Callable[[int], int] | None = None

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.settings.sequence or self.network.context

    def layout(self, ranks: int) -> Layout:
        """The layout over a number of ranks, by the mesh that was given.

        Raises:
            HpctrainError: it does not fit the ranks, the batch or the network.
        """
        if self.recipe is not None:
            recipe = self.recipe.computing(self.micro_batch(ranks)) if self.micro_batch else self.recipe
            found = Layout.of_recipe(recipe, ranks)
            found.check(self.network)
            require_micro_batches(recipe.at_data_ranks(found.mesh.data_ranks), found.mesh)
            return found
        assert self.mesh is not None
        mesh, given = self.mesh.at(ranks), dict(self.settings.layout)
        if mesh.sizes["dp_shard"] == 1:
            given.setdefault("zero", 0)
        if mesh.sizes["tp"] > 1:
            given.setdefault("sequence_parallel", True)
        part = mesh.data_ranks * given.get("micro_batch", 1)
        usual = part * max(mesh.sizes["pp"], round(_TOKENS / self.sequence / part), 1)
        batch = self.settings.batch or usual
        return Layout.of_batch(self.network, batch, sequence=self.sequence, mesh=mesh, **given)

    @property
    def epochs(self) -> int:
        """Of the recipe."""
        assert self.recipe is not None
        return self.recipe.epochs

    def trained(self, layout: Layout) -> tuple[Layout, str]:
        """A layout as it is trained, and what trains it, as the constants of a step know it: not all is compiled."""
        if self.recipe is None:
            return layout, self.settings.software
        compiled = compiled_on_gpus(_with_mesh(self.recipe, layout))
        kernels: Kernels = "fused" if compiled else "eager"
        return replace(layout, kernels=kernels), "hpctrain-compiled" if compiled else "hpctrain"

    def runs(self, layout: Layout) -> bool:
        """Whether the recipe, if there is one, can be combined with the mesh of a layout."""
        if self.recipe is not None:
            try:
                require_compatible(_with_mesh(self.recipe, layout))
            except ValidationError:
                return False
        return True

    def batch(self, ranks: int) -> int:
        """Samples of a step of a search."""
        if self.recipe is not None:
            return self.recipe.at_data_ranks(ranks).global_batch
        odd = ranks
        while odd % 2 == 0:
            odd //= 2
        return self.settings.batch or odd * max(1, round(_TOKENS / self.sequence / odd))

    @property
    def searched(self) -> tuple[Mapping[str, Any], Choices]:
        """What a search must not change, and what it may: a recipe's model is divided as hpctrain divides it."""
        if self.recipe is None:
            return self.settings.layout, Choices()
        kept = {
            "precision": self.recipe.precision,
            "divided_vocabulary": False,
            "chunked_loss": True,
            "sequence_parallel": False,
        }
        sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
        return kept, Choices(
            micro_batches=sizes,
            recomputations=("none", "full"),
            context=False,
            most_turns=2,
            state_alone=False,
            copies=True,
        )

    def minutes(self, layout: Layout, step_s: float) -> float | None:
        """Minutes of all epochs; None where the number of samples is not known."""
        if self.recipe is None or self.recipe.data.epoch_samples is None:
            return None
        batch = Batch(size=layout.global_batch, drop_last=self.recipe.batch.drop_last)
        return self.recipe.epochs * epoch_steps(batch, self.recipe.data.epoch_samples) * step_s / 60


def _with_mesh(recipe: Recipe, layout: Layout) -> Recipe:
    """A recipe with the mesh and the schedule of a layout."""
    pipeline = recipe.pipeline.model_copy(update={"schedule": layout.schedule})
    sharding = recipe.sharding.model_copy(update={"zero": 3})
    return recipe.model_copy(update={"mesh": layout.mesh, "pipeline": pipeline, "sharding": sharding})


def recipe_language_training(recipe: Recipe, *, auto: bool = False) -> LanguageTraining:
    """A recipe whose model is a language model.

    Args:
        auto: whether its mesh is searched for.
    """
    return LanguageTraining(
        name=recipe.name,
        network=recipe.model.transformer,
        settings=Settings(layout={}),
        mesh=None if auto else recipe.mesh,
        recipe=recipe,
    )


def predict_language(
    training: LanguageTraining, node: Node, networks: Sequence[Network], *, site: Site = Site()
) -> Prediction:
    """Predict the training of a transformer on each number of nodes.

    Args:
        networks: one for each number of nodes, which rises.

    Raises:
        HpctrainError: hosts without GPUs, a GPU that does not have the precision, or a mesh that does not fit.
    """
    if node.gpu == CPU:
        raise HpctrainError(
            "HT-prediction-transformer-without-gpus",
            "transformers are predicted for GPUs, whose rates are known",
            "--gpu NAME; hpctrain bench mesh measures the meshes of a CPU",
        )
    made = [_Predictor(training, node, network, site) for network in networks]
    found = [each.found() for each in made]
    last, best = made[-1], found[-1][0]
    first = _reference(made[0], found[0][0])
    rows = [each.row(candidates[0], first) for each, candidates in zip(made, found, strict=True)]
    layouts = [candidates[0].layout for candidates in found]
    idle = [
        each.network.hosts
        for each, layout in zip(made, layouts, strict=True)
        if layout.mesh.data_ranks > layout.global_batch
    ]
    searched = [] if training.mesh is not None else found[-1][:_MOST_CANDIDATES]
    return Prediction(
        name=training.name,
        node=node,
        rows=tuple(rows),
        worthwhile=worthwhile([(row.nodes, row.samples_per_s.value) for row in rows]),
        constants={name: constants()[name] for name in sorted(last.values.used)} | _step_constants(),
        causes=_causes(last, best),
        warnings=(*_warnings(last, best), *idle_warnings(idle)),
        candidates=tuple(last.row(each, first) for each in searched),
    )


def _reference(first: _Predictor, best: Candidate) -> float:
    """Samples a second and GPU on one node; on the fewest that are predicted where the mesh does not fit into one."""
    if first.network.hosts > 1 and first.training.mesh is not None:
        alone = replace(first, network=replace(first.network, hosts=1))
        with contextlib.suppress(HpctrainError):
            best, first = alone.found()[0], alone
    return best.layout.global_batch / best.step.seconds / first.ranks


@dataclass(frozen=True)
class _Predictor:
    """One training on one number of nodes."""

    training: LanguageTraining
    node: Node
    network: Network
    site: Site

    @property
    def ranks(self) -> int:
        return self.network.hosts * self.node.local

    @cached_property
    def memory_bytes(self) -> int:
        return gpu(self.node.gpu).memory_bytes

    @cached_property
    def system(self) -> System:
        network = self.network
        between = network.rails * network.rail_bytes_per_s * network.ring_share / self.node.local
        return System.of(self.node.gpu, gpus_per_node=self.node.local, network_bytes_per_s=between)

    @cached_property
    def values(self) -> Values:
        """Of the energy's constants."""
        return drawn(constants())

    def found(self) -> Sequence[Candidate]:
        """The candidates, the fastest first; of a given mesh the only one, whether it fits the memory or not."""
        training = self.training
        if training.mesh is not None:
            layout, software = training.trained(training.layout(self.ranks))
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
            trained=training.trained,
            runs=training.runs,
            sequence=training.sequence,
        )
        require_fitting(found, gpu=self.node.gpu, ranks=self.ranks, global_batch=batch, memory_bytes=self.memory_bytes)
        return found.fitting

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
        seconds = Estimate(value=step.seconds, low=step.low, high=step.high)
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
            tokens_per_s=_times(samples, self.training.sequence),
            efficiency=_exactly(efficiency),
            weak_efficiency=_exactly(efficiency),
            communication_share=_exactly(waits),
            epochs=None if minutes is None else _exactly(self.training.epochs),
            epochs_source=None if minutes is None else "the recipe's",
            minutes=None if minutes is None else _times(seconds, minutes),
            memory_bytes=Estimate(
                value=held.used, low=held.used - held.fragmentation, high=held.used + held.fragmentation
            ),
            largest_batch=self.largest(layout),
            memory_choices=self.choices(layout, held),
            layout=layout_record(layout),
            step_terms=dict(step.terms),
            memory_terms={**held.tensors, "fragmentation": held.fragmentation, "communication": held.communication},
            limited_by=step.bound,
            **self.energy(step, samples, None if minutes is None else 60 * minutes * step.seconds),
        )

    def largest(self, layout: Layout) -> int:
        """The most samples that a rank can compute at once."""
        fits, beyond = 0, 1
        while beyond < _LARGEST and self._fits(replace(layout, micro_batch=beyond)):
            fits, beyond = beyond, 2 * beyond
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self._fits(replace(layout, micro_batch=middle)) else (fits, middle)
        return fits

    def _fits(self, layout: Layout) -> bool:
        return self.held(layout).used <= USABLE * self.memory_bytes

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


def _times(found: Estimate, factor: float) -> Estimate:
    return Estimate(value=found.value * factor, low=found.low * factor, high=found.high * factor)


def _inverse(found: Estimate, of: float) -> Estimate:
    return Estimate(value=of / found.value, low=of / found.high, high=of / found.low)


def _step_constants() -> dict[str, Constant]:
    return {
        name: Constant(value=each.value, unit=each.unit, spread=each.spread, kind="published", source=each.source)
        for name, each in step_file().constants.items()
    }


def _causes(predictor: _Predictor, best: Candidate) -> tuple[Cause, ...]:
    """The effect of each constant on the step's time: one standard deviation of what was expected of it."""
    known, found = step_constants(), {}
    for name, each in step_file().constants.items():
        if each.spread:
            moved = predictor.step(best.layout, best.software, {**known, name: known[name] * math.exp(each.spread)})
            found[name] = math.log(moved.seconds / best.step.seconds)
    whole = max(sum(slope**2 for slope in found.values()), 1e-30)
    causes = [Cause(name=name, share=slope**2 / whole, step=abs(slope)) for name, slope in found.items()]
    return tuple(sorted(causes, key=lambda cause: -cause.share))


def _warnings(predictor: _Predictor, best: Candidate) -> Iterator[str]:
    training, layout = predictor.training, best.layout
    yield from predictor.network.warnings
    if training.recipe is None and training.settings.batch is None:
        tokens = layout.global_batch * training.sequence / 1e6
        yield f"assumed about the batch: {layout.global_batch} samples, {tokens:.3g} million tokens (--set batch=N)"
    if training.recipe is not None and training.recipe.data.epoch_samples is None:
        yield "how long the run takes is not known, because the size of the data is not"
