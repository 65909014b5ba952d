"""The training to predict, for any number of ranks: a recipe, or the network of a script."""

from __future__ import annotations

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
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

# Images of ImageNet's training and validation sets (Russakovsky et al. 2015, table 2), and of scikit-learn's digits.
_IMAGES = {"imagenet": (1_281_167, 50_000), "digits": (1797, 0)}

# Epochs to 75.9 % top-1 by batch, the fewest and the most of 10 to 28 seeds (reference convergence points 4.0,
# rcps_resnet.json in https://github.com/mlcommons/logging).
_REFERENCE = (
    (1632, 33, 37),
    (3264, 34, 37),
    (4096, 39, 42),
    (8192, 41, 44),
    (32768, 55, 57),
    (49152, 67, 69),
    (65536, 83, 86),
)
_TARGET = 0.759
# What nodes for training have at least: 96 to 224 cores with eight GPUs.
_CORES_OF_A_GPU = 12


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long a recipe trains with one number of ranks.

    Attributes:
        epochs: how many it trains until its result, (columns,).
        source: where the number of epochs is from.
        steps: the number of steps in an epoch.
        validated: samples that all ranks validate with after each.
        validation_cost: of one sample's forward pass, against that of a training sample: images may be larger.
        checkpoints: the number of checkpoints in an epoch.
    """

    epochs: Floats
    source: str
    steps: int
    validated: int
    validation_cost: float
    checkpoints: int


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
        """What is assumed about frozen parameters, and about data that are not at hand.

        The data of published recipes are known.
        """
        recipe = self.recipe
        found = frozen_warnings(recipe)
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

    def course(self, ranks: int, values: Values) -> Course | None:
        """How long it trains; None for a script, whose length is not known."""
        if self.recipe is None:
            return None
        recipe = self.recipe.at(ranks)
        training, validation = images(recipe, self.shards)
        count, source = epochs(recipe, values)
        steps = epoch_steps(recipe.batch, recipe.data.per_epoch(training))
        every = recipe.checkpoints.every_steps
        return Course(
            epochs=count,
            source=source,
            steps=steps,
            validated=validation,
            validation_cost=_validation_cost(recipe),
            checkpoints=1 + (steps // every if isinstance(every, int) else 0),
        )


def epoch_steps(batch: Batch, samples: int) -> int:
    """The steps of an epoch.

    Args:
        batch: with its size.

    Raises:
        HpctrainError: there is none.
    """
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
    """A recipe with the shipped workload of its network, for images of its size.

    For a ramp of image sizes, the size with the mean area of all epochs is used, as work grows with the area.

    Raises:
        HpctrainError: its mesh is more than data parallel.
    """
    require_data_parallel(recipe.mesh)
    sizes = None if recipe.data.name == "digits" else _sizes(recipe)
    mean = None if sizes is None else round(float(np.sqrt(np.mean(sizes**2))))
    shards = manifest_at_hand(recipe)
    classes = head_classes(recipe, shards)
    return Training(
        workload=load_workload(recipe.model.name, image_size=mean, classes=classes),
        largest=load_workload(
            recipe.model.name, image_size=None if sizes is None else int(sizes.max()), classes=classes
        ),
        optimizer=recipe.optimizer,
        communication=recipe.communication,
        precision=recipe.precision,
        recipe=recipe,
        shards=shards,
    )


def require_data_parallel(mesh: Mesh) -> None:
    """Refuse a mesh in which a rank does not have the whole model.

    Raises:
        HpctrainError: the mesh is such a one.
    """
    if not mesh.replicates_only:
        raise HpctrainError(
            "HT-prediction-not-possible",
            "a prediction is for ranks that each have the whole model, not for mesh {mesh}",
            "hpctrain plan shows what a mesh sends and keeps",
            mesh=mesh,
        )


def require_known(optimizer: str, precision: str) -> None:
    """Refuse names that recipes do not have.

    Raises:
        HpctrainError: an unknown name.
    """
    for option, name, valid in (
        ("optimizer", optimizer, get_args(OptimizerName)),
        ("precision", precision, get_args(Precision)),
    ):
        if name not in valid:
            raise HpctrainError(
                "HT-choice-unknown",
                "--{option} {name}: there is no {option} of this name",
                nearest(name, valid),
                option=option,
                name=name,
            )


def script_training(
    workload: Workload, *, per_rank: int, optimizer: str = "sgd", precision: str = "float32"
) -> Training:
    """The network of a script, with the buckets that ``ht.distribute`` makes by default.

    Args:
        per_rank: samples of a rank in a step.
        optimizer: a recipe's name of one; ``sgd`` has momentum.
        precision: a name that recipes accept for ``precision``.

    Raises:
        HpctrainError: an unknown name.
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
    frozen = recipe is not None and bool(recipe.model.frozen)
    return ["the parameters of model.frozen are predicted as if they were trained"] if frozen else []


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


def _validation_cost(recipe: Recipe) -> float:
    if recipe.data.name == "digits":
        return 1.0
    return float(recipe.images.test_size**2 / np.mean(_sizes(recipe) ** 2))


def epochs(recipe: Recipe, values: Values) -> tuple[Floats, str]:
    """The epochs, (columns,), and where they are from.

    A recipe that runs towards MLPerf's target with a batch within the reference convergence points takes as many as
    these did, by the logarithm of the batch; every other one takes its own.

    Args:
        recipe: resolved for a number of ranks.
    """
    own = float(recipe.epochs)
    if not _has_reference(recipe):
        return np.full(values.columns, own), "the recipe's"
    batches, fewest, most = np.array(_REFERENCE, float).T
    place = np.log(recipe.global_batch)
    low, high = (float(np.interp(place, np.log(batches), ends)) for ends in (fewest, most))
    source = "MLPerf's reference convergence points 4.0, 10 to 28 seeds"
    if own < low:
        # The schedule ends the learning rate there, so the run does not train on.
        return np.full(values.columns, own), f"the recipe's; the target takes {low:.0f} to {high:.0f} by {source}"
    return np.minimum(values.between("convergence", low, (low + high) / 2, high), own), source


def _has_reference(recipe: Recipe) -> bool:
    within = _REFERENCE[0][0] <= recipe.global_batch <= _REFERENCE[-1][0]
    target = any(row.metric == "test_accuracy" and row.value == _TARGET for row in recipe.reported)
    return (
        recipe.model.name == "resnet50" and recipe.optimizer.name == "lars" and target and within and not recipe.smoke
    )
