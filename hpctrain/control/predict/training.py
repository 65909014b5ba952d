"""The training to predict, for any number of ranks: a recipe, or the network of a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.compatibility import uncompilable
from hpctrain.common.recipes.families import IMAGENET_CLASSES
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.optimizers import UPDATE_RULES, Optimizer, OptimizerName
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Batch, Communication
from hpctrain.common.shards.folders import head_classes, manifest_at_hand
from hpctrain.common.shards.manifest import ShardManifest
from hpctrain.common.workloads.workload import Workload, load_workload
from hpctrain.control.predict.compute import CPU, Precision, Software
from hpctrain.control.predict.prediction import Length
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

# Images of ImageNet's training and validation sets (Russakovsky et al. 2015, table 2), and of scikit-learn's digits.
_IMAGES = {"imagenet": (1_281_167, 50_000), "digits": (1797, 0)}

# Batches, and epochs to 75.9 % top-1: the fewest and the most of 10 to 28 seeds (reference convergence points 4.0,
# rcps_resnet.json in https://github.com/mlcommons/logging).
_REFERENCE = (
    (1632, 3264, 4096, 8192, 32768, 49152, 65536),
    (33, 34, 39, 41, 55, 67, 83),
    (37, 37, 42, 44, 57, 69, 86),
)
_TARGET = 0.759
# What nodes for training have at least: 96 to 224 cores with eight GPUs.
_CORES_OF_A_GPU = 12


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, before its number of ranks is known.

    Attributes:
        largest: the workload of the largest images, which decide the memory.
        recipe: not for a number of ranks; None for a script's network.
        per_rank: samples of a rank in a step, of a script.
        micro_batch: chooses the recipe's for a number of ranks, where it has ``auto``.
        shards: the manifest of the recipe's images, where they are at hand; else they are taken for ImageNet's.
    """

    workload: Workload
    largest: Workload
    optimizer: Optimizer
    communication: Communication
    precision: Precision
    recipe: Recipe | None = None
    per_rank: int | None = None
    framework: str = "torch"
    micro_batch: Callable[[int], int] | None = None
    shards: ShardManifest | None = None

    @property
    def name(self) -> str:
        """The recipe's, or the network's."""
        return self.recipe.name if self.recipe else self.workload.name

    @property
    def software(self) -> Software:
        """How PyTorch runs the network on a GPU; Keras is taken to be like an eager step."""
        return "compiled" if self.recipe and self.framework == "torch" and compiled_on_gpus(self.recipe) else "eager"

    @property
    def assumptions(self) -> list[str]:
        """What is assumed about frozen parameters, and about data that are not at hand, unless all know them."""
        recipe, found = self.recipe, frozen_warnings(self.recipe)
        if recipe is None or recipe.data.name != "imagenet" or self.shards or (recipe.source and not recipe.data.path):
            return found
        classes = recipe.model.classes or IMAGENET_CLASSES
        where = f"{recipe.data.path} is not at hand" if recipe.data.path else "data.path is not given"
        counted = " and ".join(f"{count:,}" for count in images(recipe))
        return [*found, f"{where}: {classes:,} classes, and ImageNet's {counted} images, are assumed"]

    def workers(self, device: str) -> int | None:
        """Processes that decode for each rank on a device; None where nobody does."""
        if self.recipe is None or self.recipe.data.name != "imagenet":
            return None
        return self.recipe.data.decoders(0 if device == CPU else _CORES_OF_A_GPU - 1)

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether photographs are decoded by the rank's GPU."""
        return self.recipe is not None and self.recipe.data.decode == "gpu"

    @property
    def state(self) -> int:
        """Numbers that the optimizer keeps of each parameter."""
        return self.optimizer.rule.state_elements(self.optimizer)

    def batch(self, ranks: int) -> int:
        """Samples of a step over so many ranks."""
        if self.recipe:
            return self.recipe.at(ranks).global_batch
        assert self.per_rank is not None
        return self.per_rank * ranks

    def parts(self, ranks: int) -> int:
        """The number of parts in which a rank computes its samples one after the other."""
        if self.recipe is None:
            return 1
        recipe = self.recipe.at(ranks)
        if self.micro_batch:
            recipe = recipe.computing(self.micro_batch(ranks))
        return recipe.batch.parts(recipe.global_batch, ranks)

    def length(self, ranks: int, at_once: int, forward_s: Floats, step_s: Floats, values: Values) -> Length | None:
        """The steps of all epochs, the validation after each, and its checkpoints; None for a script.

        Args:
            forward_s: seconds of the forward pass of the samples that a rank computes at once, (columns,).
        """
        if self.recipe is None:
            return None
        recipe = self.recipe.at(ranks)
        samples, validated = images(recipe, self.shards)
        count, source = epochs(recipe, values)
        steps = epoch_steps(recipe.batch, recipe.data.per_epoch(samples))
        every = recipe.checkpoints.every_steps
        checkpoints = 1 + (steps // every if isinstance(every, int) else 0)
        validation = forward_s * validation_cost(recipe) * math.ceil(validated / ranks / at_once)
        training: Floats = steps * step_s
        # Ranks copy their share of the state, and write it during the following steps.
        share = 4 * (1 + self.state) * self.workload.parameters / ranks
        written = share / values["checkpoint_bytes_per_s"]
        waits = share / values["host_copy_bytes_per_s"] + np.maximum(0, written - training / checkpoints)
        epoch = training + validation + checkpoints * waits
        return Length(epochs=count, source=source, seconds=count * epoch)


def validation_cost(recipe: Recipe) -> float:
    """The forward pass of a sample in validation, where images may be larger, against one in training."""
    if recipe.data.name == "digits":
        return 1.0
    return float(recipe.images.test_size**2 / np.mean(_sizes(recipe) ** 2))


def epoch_steps(batch: Batch, samples: int) -> int:
    """The steps of an epoch; an error where there is none."""
    steps = batch.iterations(samples)
    if not steps:
        raise HpctrainError(
            "HT-batch-too-large",
            "an epoch of {samples} samples has no whole batch of {global_batch}",
            "--set batch.drop_last=false, a smaller batch, or more data",
            samples=samples,
            global_batch=batch.size,
        )
    return steps


def compiled_on_gpus(recipe: Recipe) -> bool:
    """Whether a run on GPUs compiles the recipe's network."""
    return recipe.compile != "off" and uncompilable(recipe) is None


def recipe_training(recipe: Recipe) -> Training:
    """A recipe with the shipped workload of its network, for images of the mean area of all epochs."""
    require_data_parallel(recipe.mesh)
    sizes = None if recipe.data.name == "digits" else _sizes(recipe)
    shards = manifest_at_hand(recipe)
    classes = head_classes(recipe, shards)

    def of_size(pixels: float | None) -> Workload:
        return load_workload(recipe.model.name, image_size=None if pixels is None else round(pixels), classes=classes)

    return Training(
        workload=of_size(None if sizes is None else float(np.sqrt(np.mean(sizes**2)))),
        largest=of_size(None if sizes is None else float(sizes.max())),
        optimizer=recipe.optimizer,
        communication=recipe.communication,
        precision=recipe.precision,
        recipe=recipe,
        shards=shards,
    )


def require_data_parallel(mesh: Mesh) -> None:
    """Refuse a mesh in which a rank does not have the whole model."""
    if not mesh.replicates_only:
        raise HpctrainError(
            "HT-prediction-not-possible",
            "a prediction is for ranks that each have the whole model, not for mesh {mesh}",
            "hpctrain plan shows what a mesh sends and keeps",
            mesh=mesh,
        )


def require_known(optimizer: str, precision: str) -> None:
    """Refuse names that recipes do not have."""
    valid = {"optimizer": get_args(OptimizerName), "precision": get_args(Precision)}
    for option, name in {"optimizer": optimizer, "precision": precision}.items():
        if name not in valid[option]:
            remedy = nearest(name, valid[option])
            raise HpctrainError(
                "HT-choice-unknown", "--{option} {name}: there is no such {option}", remedy, option=option, name=name
            )


def script_training(
    workload: Workload, *, per_rank: int, optimizer: str = "sgd", precision: str = "float32"
) -> Training:
    """The network of a script, by recipes' names of optimizer and precision, with ``ht.distribute``'s default buckets.

    Args:
        per_rank: samples of a rank in a step.
    """
    require_known(optimizer, precision)
    name = cast(OptimizerName, optimizer)
    own: dict[str, Any] = {"name": name, "learning_rate": 0.1, **UPDATE_RULES[name].example}
    return Training(
        workload=workload,
        largest=workload,
        optimizer=Optimizer.model_validate(own),
        communication=Communication(),
        precision=cast(Precision, precision),
        per_rank=per_rank,
    )


def frozen_warnings(recipe: Recipe | None) -> list[str]:
    """What is assumed of parameters that are not trained."""
    if recipe is None or not recipe.model.frozen:
        return []
    return ["the parameters of model.frozen are predicted as if they were trained"]


def images(recipe: Recipe, shards: ShardManifest | None = None) -> tuple[int, int]:
    """Samples of the training and of the validation set; those of ImageNet where its shards are not at hand."""
    training, validation = _IMAGES[recipe.data.name]
    if shards is not None:
        training, validation = shards.splits["train"].samples, shards.splits["val"].samples
    if recipe.data.name == "digits":
        validation = round(training * recipe.data.test_fraction)
        return training - validation, validation
    limit = recipe.data.limit
    return (min(training, limit), min(validation, limit)) if limit else (training, validation)


def _sizes(recipe: Recipe) -> Floats:
    """Pixels a side in each epoch."""
    ramp = recipe.images.size_ramp
    if not ramp:
        return np.full(recipe.epochs, float(recipe.images.size))
    at, pixels = np.array(ramp, float).T
    sizes: Floats = np.maximum(32, 32 * np.round(np.interp(np.arange(recipe.epochs), at, pixels) / 32))
    return sizes


def epochs(recipe: Recipe, values: Values) -> tuple[Floats, str]:
    """The epochs, (columns,), and where they are from.

    A recipe, resolved for a number of ranks, that runs towards MLPerf's target with a batch within the reference
    convergence points takes as many as these did, by the logarithm of the batch; every other one takes its own.
    """
    own, batch = float(recipe.epochs), recipe.global_batch
    target = any(row.metric == "test_accuracy" and row.value == _TARGET for row in recipe.reported)
    by_lars = recipe.model.name == "resnet50" and recipe.optimizer.name == "lars" and not recipe.smoke
    batches, fewest, most = _REFERENCE
    if not (target and by_lars and batches[0] <= batch <= batches[-1]):
        return np.full(values.columns, own), "the recipe's"
    low, high = (float(np.interp(np.log(batch), np.log(batches), ends)) for ends in (fewest, most))
    source = "MLPerf's reference convergence points 4.0, 10 to 28 seeds"
    if own < low:
        # The schedule ends the learning rate there, so the run does not train on.
        return np.full(values.columns, own), f"the recipe's; the target takes {low:.0f} to {high:.0f} by {source}"
    place = np.clip(values.log_factor("convergence"), -2.0, 2.0) / 4
    return np.minimum((low + high) / 2 + place * (high - low), own), source
