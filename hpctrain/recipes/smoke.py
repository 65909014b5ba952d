"""A recipe made so small that two cores go through all of it in a minute or two."""

from __future__ import annotations

import math

from hpctrain.recipes.schedule import Schedule
from hpctrain.recipes.schema import Batch, Images, Optimizer, Recipe, Transition

EPOCHS = 3
# Of each split of imagenet.
_IMAGES = 256
_PIXELS = 64
_SMALLEST_PIXELS = 32
# Samples of a step over all ranks, at once where the recipe accumulates, and with one statistic in ghost batch norm.
_BATCH = 16
_MICRO_BATCH = 4
_GHOST = 2


def smoke(recipe: Recipe) -> Recipe:
    """The same recipe on few and small images, in small batches, for :data:`EPOCHS` epochs.

    All that is counted in epochs shrinks alike, so that warm-up, milestones and ramps are gone through. The rates
    follow the batch: linearly (Goyal et al. 2017, arXiv 1706.02677, section 2.1), with lars and lamb by its square root
    (You et al. 2019, arXiv 1904.00962). What comes out says that the recipe runs, and nothing about its result.
    """
    shrunk = EPOCHS / recipe.epochs
    changes: dict[str, object] = {
        "name": f"{recipe.name}-smoke",
        "model": {**dict(recipe.model), "batch_norm": {**dict(recipe.model.batch_norm), "span": _span(recipe)}},
        "batch": _batch(recipe.batch),
        "optimizer": _optimizer(recipe, shrunk),
        "schedule": _schedule(recipe, shrunk),
        "epochs": EPOCHS,
        "median_of": min(recipe.median_of, EPOCHS),
    }
    if recipe.data.name == "imagenet":
        changes["data"] = {**dict(recipe.data), "limit": _IMAGES}
        changes["images"] = _images(recipe.images, shrunk)
    return Recipe.model_validate({**dict(recipe), **changes})


def _usual_batch(recipe: Recipe) -> int:
    """The batch that the recipe's rates are for."""
    batch = recipe.batch
    fixed = batch.size or (batch.per_rank or 1) * (batch.emulated_ranks or 1)
    return fixed if batch.size or batch.emulated_ranks else recipe.schedule.base_batch or fixed


def _factor(recipe: Recipe) -> float:
    ratio = _BATCH / _usual_batch(recipe)
    return math.sqrt(ratio) if recipe.optimizer.name in ("lars", "lamb") else ratio


def _optimizer(recipe: Recipe, shrunk: float) -> Optimizer:
    settings, base = recipe.optimizer, recipe.schedule.base_batch
    peak = settings.learning_rate * _factor(recipe) * (_usual_batch(recipe) / base if base else 1)
    values = {**dict(settings), "learning_rate": peak * _MICRO_BATCH / _BATCH if base else peak}
    if settings.transition:
        epochs = {"center": settings.transition.center * shrunk, "period": settings.transition.period * shrunk}
        values["transition"] = Transition.model_validate({**dict(settings.transition), **epochs})
    return Optimizer.model_validate(values)


def _schedule(recipe: Recipe, shrunk: float) -> Schedule:
    schedule, factor = recipe.schedule, _factor(recipe)
    values = {
        **dict(schedule),
        # Below the batch, so that the warm-up climbs.
        "base_batch": _MICRO_BATCH if schedule.base_batch else None,
        "warmup_epochs": schedule.warmup_epochs * shrunk,
        "warmup_from": None if schedule.warmup_from is None else schedule.warmup_from * factor,
        "milestones": tuple(epoch * shrunk for epoch in schedule.milestones),
        "peak_epoch": None if schedule.peak_epoch is None else schedule.peak_epoch * shrunk,
        "end_rate": schedule.end_rate * factor,
        "decay_steps": None,
    }
    return Schedule.model_validate(values)


def _batch(batch: Batch) -> Batch:
    if batch.emulated_ranks:
        return Batch(per_rank=_MICRO_BATCH, emulated_ranks=_BATCH // _MICRO_BATCH, drop_last=batch.drop_last)
    piece = min(batch.micro_batch, _MICRO_BATCH) if batch.micro_batch else None
    return Batch(size=_BATCH, micro_batch=piece, drop_last=batch.drop_last)


def _span(recipe: Recipe) -> int | str | None:
    """Fewer images than a rank computes at once stay fewer, and those of several ranks become those of all."""
    span, at_once = recipe.model.batch_norm.span, recipe.batch.micro_batch or recipe.batch.per_rank
    if not isinstance(span, int):
        return span
    return "world" if at_once and span > at_once else _GHOST


def _images(images: Images, shrunk: float) -> Images:
    largest = max((pixels for _, pixels in images.size_ramp), default=images.size)
    scale = min(1.0, _PIXELS / largest)
    ramp = [
        (epoch * shrunk, max(_SMALLEST_PIXELS, int(pixels * scale) // _SMALLEST_PIXELS * _SMALLEST_PIXELS))
        for epoch, pixels in images.size_ramp
    ]
    test_scale = min(1.0, _PIXELS / images.test_size)
    values = {
        **dict(images),
        "size": min(images.size, _PIXELS),
        "size_ramp": tuple(ramp),
        "test_size": min(images.test_size, _PIXELS),
        "test_resize": math.ceil(images.test_resize * test_scale),
    }
    return Images.model_validate(values)
