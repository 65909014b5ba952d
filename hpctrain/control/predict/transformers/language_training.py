"""The training of a transformer, before its number of ranks is known: a recipe's, or what ``--set`` says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.compatibility import incompatibilities
from hpctrain.common.recipes.mesh import Mesh, Pipeline
from hpctrain.common.recipes.requirements import require_micro_batches
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.prediction import Length
from hpctrain.control.predict.training import compiled_on_gpus, epoch_steps
from hpctrain.control.predict.transformers.layout import CHOICES, STATES, Layout, check_layout
from hpctrain.control.predict.transformers.model_sizes import read_value

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe
    from hpctrain.control.topology.fabric import Floats

# Tokens of a step where nobody says how many: GPT-3's larger models had 2 to 3.2 million (Brown et al. 2020, table
# 2.1), Llama 2 and 3 had 4 (Touvron et al. 2023, section 2.2; Grattafiori et al. 2024, section 3.4).
_TOKENS = 2**22
# What --mesh, or the batch, decides.
_DECIDED = ("mesh", "micro_batches", "samples")
_FIELDS = {each.name: str(each.type) for each in fields(Layout) if each.name not in _DECIDED}
SETTINGS: tuple[str, ...] = ("batch", "sequence", "software", *_FIELDS)


def parse_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of texts of the form ``KEY=VALUE``, see :class:`LanguageTraining`."""
    found: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in SETTINGS:
            raise HpctrainError(
                "HT-set-unknown-key",
                "--set {text}: a transformer has no setting {key!r}",
                nearest(key, SETTINGS),
                text=text,
                key=key,
            )
        kind = "int" if key in ("batch", "sequence") else _FIELDS.get(key, "str")
        choices = tuple(STATES) if kind == "StateBytes" else CHOICES.get(key, ())
        read = read_value(f"--set {text}", key, value, kind=kind, choices=choices)
        if read == 0 and kind == "int" and key != "prefetch":
            raise HpctrainError("HT-option-bad-value", "--set {text}: at least 1", text=text)
        found[key] = STATES[read] if kind == "StateBytes" else read
    return found


def _usual_batch(ranks: int, samples: float) -> int:
    """About so many samples, a quarter more or less, that data-parallel ranks and micro-batches divide in many ways."""
    odd = ranks
    while odd % 2 == 0:
        odd //= 2
    parts = [odd << power for power in range(32) if odd << power <= 1.25 * samples] or [odd]
    found = [part * max(1, round(samples / part)) for part in reversed(parts)]
    return next((each for each in found if abs(each - samples) <= samples / 4), found[-1])


@dataclass(frozen=True, kw_only=True)
class LanguageTraining:
    """The training of a transformer, before its number of ranks is known.

    Attributes:
        mesh: None to search for the best one.
        settings: those of :data:`SETTINGS` that were given: fields of :class:`Layout`; ``batch``, samples of a step
            over all ranks, by default as many as have about four million tokens; ``sequence``, tokens of a sample, by
            default the network's context; and the ``software`` that trains.
        recipe: whose model it is; None for a transformer of its own.
        micro_batch: chooses the recipe's for a number of ranks, where it has ``auto``.
    """

    name: str
    network: Transformer
    mesh: Mesh | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    micro_batch: Callable[[int], int] | None = None

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return int(self.settings.get("sequence") or self.network.context)

    @property
    def stated(self) -> dict[str, Any]:
        """The fields of a layout that were given."""
        return {key: value for key, value in self.settings.items() if key in _FIELDS}

    def layout(self, ranks: int) -> Layout:
        """The layout over a number of ranks, by the mesh that was given."""
        if self.recipe is not None:
            recipe = self.recipe.computing(self.micro_batch(ranks)) if self.micro_batch else self.recipe
            found = Layout.of_recipe(recipe, ranks)
            check_layout(found, self.network)
            require_micro_batches(recipe.at_data_ranks(found.mesh.data_ranks), found.mesh)
            return found
        assert self.mesh is not None
        mesh, given = self.mesh.at(ranks), self.stated
        if mesh.sizes["dp_shard"] == 1:
            given.setdefault("zero", 0)
        if mesh.sizes["tp"] > 1:
            given.setdefault("sequence_parallel", True)
        part = mesh.data_ranks * given.get("micro_batch", 1)
        usual = part * max(mesh.sizes["pp"], round(_TOKENS / self.sequence / part), 1)
        batch = self.settings.get("batch") or usual
        return Layout.of_batch(self.network, batch, sequence=self.sequence, mesh=mesh, **given)

    def trained(self, layout: Layout) -> tuple[Layout, str]:
        """A layout as it is trained, and what trains it, as the constants of a step know it: not all is compiled."""
        if self.recipe is None:
            return layout, self.settings.get("software", "pytorch")
        if compiled_on_gpus(_with_mesh(self.recipe, layout)):
            return replace(layout, kernels="fused"), "hpctrain-compiled"
        return replace(layout, kernels="eager"), "hpctrain"

    def runs(self, layout: Layout) -> bool:
        """Whether the recipe, if there is one, can be combined with the mesh of a layout."""
        return self.recipe is None or not any(incompatibilities(_with_mesh(self.recipe, layout)))

    def batch(self, ranks: int) -> int:
        """Samples of a step of a search."""
        if self.recipe is not None:
            return self.recipe.at_data_ranks(ranks).global_batch
        return self.settings.get("batch") or _usual_batch(ranks, _TOKENS / self.sequence)

    @property
    def searched(self) -> dict[str, Any]:
        """What a search must not change: a recipe's model is divided as hpctrain divides it."""
        if self.recipe is None:
            return self.stated
        kept: dict[str, Any] = {
            "precision": self.recipe.precision,
            "autocast": self.recipe.precision != "float32",
            "divided_vocabulary": False,
            "chunked_loss": True,
            "sequence_parallel": False,
        }
        if self.recipe.pipeline.schedule != Pipeline().schedule:
            kept["schedule"] = self.recipe.pipeline.schedule
        return kept

    def length(self, layout: Layout, step_s: Floats) -> Length | None:
        """How long all epochs take by steps of such a time; None where the number of samples is not known."""
        recipe = self.recipe
        if recipe is None or recipe.data.epoch_samples is None:
            return None
        batch = recipe.batch.model_copy(update={"size": layout.global_batch, "per_rank": None})
        steps = recipe.epochs * epoch_steps(batch, recipe.data.epoch_samples)
        return Length(epochs=np.full(len(step_s), recipe.epochs), source="the recipe's", seconds=steps * step_s)


def _with_mesh(recipe: Recipe, layout: Layout) -> Recipe:
    """A recipe with the mesh and the schedule of a layout."""
    pipeline = recipe.pipeline.model_copy(update={"schedule": layout.schedule})
    sharding = recipe.sharding.model_copy(update={"zero": 3})
    return recipe.model_copy(update={"mesh": layout.mesh, "pipeline": pipeline, "sharding": sharding})


def recipe_language_training(recipe: Recipe, *, auto: bool = False) -> LanguageTraining:
    """A recipe whose model is a language model, on its mesh or, with ``auto``, on the one that a search finds."""
    mesh = None if auto else recipe.mesh
    return LanguageTraining(name=recipe.name, network=recipe.model.transformer, mesh=mesh, recipe=recipe)
