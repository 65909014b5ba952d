"""Opens the samples that a recipe names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import has_folder, shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.data.samples import InMemory, Samples, SampleSource

if TYPE_CHECKING:
    from hpctrain.worker.comm import Communicator

# Vocabularies are padded to a multiple of this, with which matrix products are faster.
_MULTIPLE = 64


def _unfit(problem: str, hint: str) -> HpctrainError:
    """The error for data and a recipe that do not go together."""
    return HpctrainError("HT-data-unfit", "{problem}", hint, problem=problem)


def open_sources(recipe: Recipe, comm: Communicator | None = None) -> tuple[SampleSource, SampleSource]:
    """The training and the validation samples of a recipe.

    Raises:
        HpctrainError: the recipe's data are missing or incomplete.
    """
    if recipe.data.name == "digits":
        seed = recipe.seed if recipe.data.split_seed is None else recipe.data.split_seed
        train, test = load_digits(test_fraction=recipe.data.test_fraction, seed=seed)
        return InMemory(samples=train), InMemory(samples=test)
    return _text(recipe) if recipe.data.name == "text" else _imagenet(recipe, comm)


def load_digits(*, test_fraction: float, seed: int) -> tuple[Samples, Samples]:
    """The training and the test set of scikit-learn's 1,797 digits, every class with the same share of both.

    The images are grey, 8 x 8 pixels of 0 to 1, in ten classes.

    Raises:
        HpctrainError: one of the two would lack a class.
    """
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    images, labels = bundled(return_X_y=True)
    everything = Samples(
        images=(images / 16).astype(np.float32).reshape(-1, 8, 8, 1),
        labels=labels.astype(np.int64),
    )
    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, random_state=seed, stratify=labels
        )
    except ValueError as error:
        problem = f"data.test_fraction={test_fraction:g} cannot divide the {len(labels)} digits: {error}"
        raise _unfit(problem, "choose a fraction between 0.01 and 0.99") from error
    return everything[train], everything[test]


def _text(recipe: Recipe) -> tuple[SampleSource, SampleSource]:
    from hpctrain.common.shards.text.token_manifest import TokenShards
    from hpctrain.worker.data.text import Windows, bundled_tokens

    context = recipe.model.context
    if has_folder(recipe):
        folder = shard_folder(recipe)
        train, val = TokenShards(folder, "train"), TokenShards(folder, "val")
        tokens = train.manifest.settings.tokenizer.vocabulary
        if tokens > recipe.model.vocabulary:
            problem = f"{folder} has {tokens:,} tokens, but the model's vocabulary has {recipe.model.vocabulary:,}"
            raise _unfit(problem, f"--set model.vocabulary={-(-tokens // _MULTIPLE) * _MULTIPLE}")
        sources = Windows(train, context, recipe.seed), Windows(val, context)
    else:
        bundled, held_out = bundled_tokens()
        sources = Windows(bundled, context, recipe.seed), Windows(held_out, context)
    for name, source in zip(("train", "val"), sources, strict=True):
        if not len(source):
            hint = "prepare more text or, for val, with a larger --validation-share; or --set model.context=…"
            raise _unfit(f"the text in {name} is shorter than a window of {context} tokens", hint)
    return sources


def _imagenet(recipe: Recipe, comm: Communicator | None) -> tuple[SampleSource, SampleSource]:
    from hpctrain.worker.data.image_loader import ImageNet, Pool, WorkerPool

    if recipe.model.name == "digits_cnn":
        problem = f"recipe {recipe.name}: digits_cnn takes the digits' images of 8 x 8 pixels, not photographs"
        raise _unfit(problem, "--set model.name=resnet50, or resnet18, resnet101; or --set data.name=digits")
    folder = shard_folder(recipe)
    pool: Pool
    if recipe.data.decode == "gpu":
        from hpctrain.worker.data.gpu_decoder import CardPool, require_card

        pool = CardPool(folder, recipe, require_card(comm))
    else:
        pool = WorkerPool(folder, recipe)
    train, val = ImageNet(folder, "train", recipe, pool), ImageNet(folder, "val", recipe, pool)
    most = recipe.model.classes
    if most is not None and len(train.classes) > most:
        problem = f"{folder} has {len(train.classes)} classes, and model.classes gives {recipe.model.name} only {most}"
        raise _unfit(problem, "--set model.classes=null makes the last layer for the classes of the data")
    return train, val


def with_head(recipe: Recipe, train: SampleSource, comm: Communicator) -> Recipe:
    """The recipe with as many classes as its training samples have, where they are photographs and it gives no number.

    A larger number that it gives stays, which is said.
    """
    if recipe.data.name != "imagenet":
        return recipe
    from hpctrain.worker.data.image_loader import ImageNet

    assert isinstance(train, ImageNet)
    found, asked = len(train.classes), recipe.model.classes
    if asked is not None:
        if asked > found:
            comm.say(f"model.classes: {asked}, of which the data have {found}")
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"classes": found})})
