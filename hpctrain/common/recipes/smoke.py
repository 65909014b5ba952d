"""Shrinks a recipe so that two cores can go through all of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpctrain.common.recipes.augmentation import Averaging, Mixing
from hpctrain.common.recipes.optimizers import Optimizer, Transition
from hpctrain.common.recipes.schedule import Schedule
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Batch, Images

EPOCHS = 3
# Images in each split of imagenet.
_IMAGES = 256
_PIXELS = 64
_SMALLEST_PIXELS = 32
# Samples of a step over all ranks, at once where the recipe accumulates, and with one statistic in ghost batch norm.
_BATCH = 16
_MICRO_BATCH = 4
_GHOST = 2
_SMALLEST_GROUP = 2
# The decay of the parameters' average.
_DECAY = 0.5
# The bytes and a separator, padded as GPT-2's vocabulary is to a multiple of 64.
_BYTES = 320
# Steps of a recipe that trains on text.
_STEPS = 100
# An epoch of the recipe in the small run.
_Shrunk = Callable[[float], float]


def smoke(recipe: Recipe) -> Recipe:
    """The same recipe on few and small images, in small batches, for :data:`EPOCHS` epochs.

    All that is counted in epochs shrinks alike, so that warm-up, milestones and ramps are gone through. The rates
    follow the batch: linearly (Goyal et al. 2017, arXiv 1706.02677, section 2.1), with rules that adapt the size of
    their steps by its square root (You et al. 2019, arXiv 1904.00962), and RMSprop's part of a transition not at all. A
    GPT's are the larger, the narrower it becomes (Yang et al. 2022, arXiv 2203.03466, table 3).
    Images that cannot be decoded are left out. A GPT is made small too, computes in float32, as processors are slow in
    16 bits, and reads the bytes of text that ships with Python where ``data.path`` names none. What comes out says that
    the recipe runs, and nothing about its result.
    """

    def shrunk(epoch: float) -> float:
        # Multiplied first: 187 x (3 / 187) is above 3.
        return epoch * EPOCHS / recipe.epochs

    changes: dict[str, object] = {
        "name": f"{recipe.name}-smoke",
        "model": _model(recipe),
        "batch": _batch(recipe.batch),
        "optimizer": _optimizer(recipe, shrunk),
        "schedule": _schedule(recipe, shrunk),
        "epochs": EPOCHS,
        "smoke": True,
        "median_of": min(recipe.median_of, EPOCHS),
        "mixing": _mixing(recipe),
        "averaging": _averaging(recipe.averaging, shrunk),
        "sync": recipe.sync and recipe.sync.model_copy(update={"after_epochs": shrunk(recipe.sync.after_epochs)}),
    }
    if recipe.data.name == "imagenet":
        changes["data"] = {**dict(recipe.data), "limit": _IMAGES}
        changes["images"] = _images(recipe.images, shrunk)
    if recipe.data.name == "text":
        changes["precision"] = "float32"
        changes["data"] = {**dict(recipe.data), "epoch_samples": _STEPS * _BATCH}
    return Recipe.model_validate({**dict(recipe), **changes})


def _model(recipe: Recipe) -> dict[str, object]:
    values = {**dict(recipe.model), "batch_norm": {**dict(recipe.model.batch_norm), "span": _span(recipe)}}
    if recipe.model.family.predicts_tokens:
        values |= {"vocabulary": recipe.model.vocabulary if recipe.data.path else _BYTES}
    return {**values, **recipe.model.family.smoke}


def _usual_batch(recipe: Recipe) -> int:
    """The batch that the recipe's rates are for."""
    return recipe.batch.fixed_size or recipe.schedule.base_batch or recipe.batch.per_rank or _BATCH


def _factor(recipe: Recipe) -> float:
    ratio = _BATCH / _usual_batch(recipe)
    if not recipe.optimizer.rule.adapts:
        return ratio
    narrower = recipe.model.width / recipe.model.family.smoke.get("width", recipe.model.width)
    return math.sqrt(ratio) * narrower


def _optimizer(recipe: Recipe, shrunk: _Shrunk) -> Optimizer:
    settings, base = recipe.optimizer, recipe.schedule.base_batch
    peak = settings.learning_rate * _factor(recipe) * (_usual_batch(recipe) / base if base else 1)
    values = {**dict(settings), "learning_rate": peak * _MICRO_BATCH / _BATCH if base else peak}
    if settings.transition:
        transition = settings.transition
        epochs = {"center": shrunk(transition.center), "period": shrunk(transition.period)}
        own = {"rmsprop_rate": transition.rmsprop_rate / _factor(recipe)}
        values["transition"] = Transition.model_validate({**dict(transition), **epochs, **own})
    return Optimizer.model_validate(values)


def _schedule(recipe: Recipe, shrunk: _Shrunk) -> Schedule:
    schedule, factor = recipe.schedule, _factor(recipe)
    values = {
        **dict(schedule),
        # Below the batch, so that the warm-up climbs.
        "base_batch": _MICRO_BATCH if schedule.base_batch else None,
        "warmup_epochs": EPOCHS * schedule.climb_share if schedule.warmup_steps else shrunk(schedule.warmup_epochs),
        "warmup_steps": None,
        "warmup_from": None if schedule.warmup_from is None else schedule.warmup_from * factor,
        "milestones": tuple(map(shrunk, schedule.milestones)),
        "peak_epoch": None if schedule.peak_epoch is None else shrunk(schedule.peak_epoch),
        "end_rate": schedule.end_rate * factor,
        "decay_steps": None,
    }
    return Schedule.model_validate(values)


def _batch(batch: Batch) -> Batch:
    if batch.emulated_ranks:
        return batch.model_copy(update={"per_rank": _MICRO_BATCH, "emulated_ranks": _BATCH // _MICRO_BATCH})
    piece = batch.micro_batch
    if isinstance(piece, int):
        piece = min(piece, _MICRO_BATCH)
    return batch.model_copy(update={"size": _BATCH, "per_rank": None, "micro_batch": piece})


def _mixing(recipe: Recipe) -> Mixing | None:
    """Groups are the same part of a step, of two samples at the least."""
    mixing = recipe.mixing
    if mixing is None or mixing.group is None:
        return mixing
    group = max(_SMALLEST_GROUP, round(mixing.group * _BATCH / _usual_batch(recipe)))
    return mixing.model_copy(update={"group": group})


def _averaging(averaging: Averaging | None, shrunk: _Shrunk) -> Averaging | None:
    """Over few steps: of the recipe's own number the small run has not as many."""
    return averaging and Averaging(decay=_DECAY, begin_epoch=shrunk(averaging.begin_epoch))


def _span(recipe: Recipe) -> int | str | None:
    """A span of what a rank computes at once stays that, a smaller one stays smaller, a larger one is all ranks."""
    span, at_once = recipe.model.batch_norm.span, recipe.batch.micro_batch or recipe.batch.per_rank
    if not isinstance(span, int):
        return span
    if at_once is None or at_once == "auto" or span < at_once:
        return _GHOST
    return "world" if span > at_once else None


def _images(images: Images, shrunk: _Shrunk) -> Images:
    largest = max((pixels for _, pixels in images.size_ramp), default=images.size)
    scale = min(1.0, _PIXELS / largest)
    ramp = [
        (shrunk(epoch), max(_SMALLEST_PIXELS, int(pixels * scale) // _SMALLEST_PIXELS * _SMALLEST_PIXELS))
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
