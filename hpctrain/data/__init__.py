"""Opens the samples that a recipe names."""

from __future__ import annotations

from hpctrain.data.samples import InMemory
from hpctrain.data.source import Source
from hpctrain.errors import HpctrainError
from hpctrain.recipes.requirements import has_folder, shard_folder
from hpctrain.recipes.schema import Recipe

# That the networks for photographs tell apart.
_CLASSES = 1000
# Vocabularies are padded to one, which matrix products prefer.
_MULTIPLE = 64


def open_sources(recipe: Recipe) -> tuple[Source, Source]:
    """The training and the validation samples of a recipe.

    Raises:
        HpctrainError: the recipe's data are not there, or not whole.
    """
    if recipe.data.name == "digits":
        from hpctrain.data.digits import load_digits

        seed = recipe.seed if recipe.data.split_seed is None else recipe.data.split_seed
        train, test = load_digits(test_fraction=recipe.data.test_fraction, seed=seed)
        return InMemory(samples=train), InMemory(samples=test)
    return _text(recipe) if recipe.data.name == "text" else _imagenet(recipe)


def _text(recipe: Recipe) -> tuple[Source, Source]:
    from hpctrain.data.text import Windows, bundled_tokens
    from hpctrain.shards.text.read import TokenShards

    context = recipe.model.context
    if has_folder(recipe):
        folder = shard_folder(recipe)
        train, val = TokenShards(folder, "train"), TokenShards(folder, "val")
        tokens = train.manifest.settings.tokenizer.vocabulary
        if tokens > recipe.model.vocabulary:
            raise HpctrainError(
                f"{folder} has {tokens:,} tokens, and the model tells {recipe.model.vocabulary:,} apart",
                f"--set model.vocabulary={-(-tokens // _MULTIPLE) * _MULTIPLE}",
            )
        sources = Windows(train, context, recipe.seed), Windows(val, context)
    else:
        bundled, held_out = bundled_tokens()
        sources = Windows(bundled, context, recipe.seed), Windows(held_out, context)
    for name, source in zip(("train", "val"), sources, strict=True):
        if not len(source):
            raise HpctrainError(
                f"the text in {name} is shorter than a window of {context} tokens",
                "prepare more text or, for val, with a larger --validation-share; or --set model.context=…",
            )
    return sources


def _imagenet(recipe: Recipe) -> tuple[Source, Source]:
    from hpctrain.data.loader import ImageNet, WorkerPool

    if recipe.model.name == "digits_cnn":
        raise HpctrainError(
            f"recipe {recipe.name}: digits_cnn takes the digits' images of 8 x 8 pixels, no photographs",
            "--set model.name=resnet50, or resnet18, resnet101; or --set data.name=digits",
        )
    folder = shard_folder(recipe)
    pool = WorkerPool(folder, recipe)
    train, val = ImageNet(folder, "train", recipe, pool), ImageNet(folder, "val", recipe, pool)
    if len(train.classes) > _CLASSES:
        raise HpctrainError(
            f"{folder} has {len(train.classes)} classes, and {recipe.model.name} tells {_CLASSES} apart",
            "--set data.path=DIR names a folder with fewer classes",
        )
    return train, val
