"""Writes a commented recipe for data of one's own, whose values follow stated rules from what the data are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.common.files.checked_yaml import dump

LARGE = 100_000
"""Training images from which on a recipe is written for a large data set."""

_KEYS = "# What each key means, and which others there are: docs/reference/recipe-keys.md, hpctrain recipes schema."


@dataclass(frozen=True, kw_only=True)
class OwnImages:
    """A data set of images.

    Attributes:
        train, val: the numbers of images.
        side: the median of the shorter sides of some training images, in pixels.
    """

    classes: int
    train: int
    val: int
    side: int


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """A data set of tokens; ``train`` and ``val`` are their numbers."""

    vocabulary: int
    train: int
    val: int


@dataclass(frozen=True, kw_only=True)
class OwnWeights:
    """What a network begins with.

    Attributes:
        model: the name of the network that they are of.
    """

    path: str
    model: str


def own_recipe(name: str, data: OwnImages | OwnText, path: str, weights: OwnWeights | None = None) -> str:
    """The text of a recipe.

    Args:
        path: the folder of the shards or tokens, which may still have to be made.
        weights: what a network of images is to begin with.
    """
    if isinstance(data, OwnText):
        details, rest = f"tokens, of a vocabulary of {data.vocabulary:,}", _text(data, path)
    else:
        details = f"images, of {data.classes:,} classes; the median of their shorter sides is {data.side} pixels"
        rest = _images(data, path, weights)
    return f"# {data.train:,} training and {data.val:,} validation {details}.\n{_KEYS}\n{_line('name', name)}\n\n{rest}"


def _line(key: str, value: str) -> str:
    return dump({key: value}).rstrip("\n")


def _power_of_two(number: float, least: int, most: int) -> int:
    """The largest power of two up to a number, within bounds that are such powers."""
    return min(most, max(least, 1 << int(math.log2(max(1, number)))))


_DRAWN = f"""model:
  # resnet18 below {LARGE:,} images, resnet50 from there on. The last layer has as many outputs as the data has classes.
  name: %s"""
_GIVEN = """model:
  name: %s # of which the weights are
  # The weights that the training begins with. A last layer for other classes is drawn anew.
  %s
  new_head: auto
  # Parts that are not to change, for example the first ones: [conv1, bn1, layer1]
  frozen: []"""
_RATES = """
  # All but the last layer, fc, learn at a tenth of the rate, since their weights are good already.
  rates: {"conv1": 0.1, "bn1": 0.1, "layer*": 0.1}"""


def _images(data: OwnImages, path: str, weights: OwnWeights | None) -> str:
    size = min(224, max(32, data.side // 32 * 32))
    large = data.train >= LARGE
    model = _DRAWN % ("resnet50" if large else "resnet18")
    few, many = 30, 90
    if weights:
        model = _GIVEN % (weights.model, _line("init_from", weights.path))
        few, many = 10, 30
    return f"""{model}
data:
  name: imagenet # shards of images, whatever they show
  {_line("path", path)}
  broken_images: skip # an image that cannot be decoded is left out, counted and named; stop ends the run

images:
  # The median shorter side, down to a multiple of 32, within 32 and 224.
  size: {size}
  test_size: {size}
  # 8/7 of it, as 256 pixels are of 224: of that the centre is validated with.
  test_resize: {math.ceil(size * 8 / 7)}
  # Random crops have at least this share of the area; more below 64 pixels, where there is little to leave out.
  crop_area: [{0.6 if data.side < 64 else 0.08}, 1.0]
  # Mirrored at random. Set it to false where left and right differ in meaning, as with digits and letters.
  flip: true

batch:
  # The largest power of two with at least 20 steps an epoch, within 8 and 256; all ranks share it.
  size: {_power_of_two(data.train / 20, 8, 256)}

optimizer:
  name: sgd
  learning_rate: 0.1 # for schedule.base_batch images a step; scaled to the batch (Goyal et al. 2017)
  momentum: 0.9
  nesterov: true
  weight_decay: 1.0e-4{_RATES if weights else ""}
schedule:
  name: cosine
  base_batch: 256

# {few} below {LARGE:,} images, {many} from there on; more help where the test accuracy still rises at the end.
epochs: {many if large else few}
seed: 0
"""


def _text(data: OwnText, path: str) -> str:
    large = data.train >= 10**9
    layers, heads, width, context = (12, 12, 768, 1024) if large else (6, 6, 384, 256)
    return f"""model:
  # Below a billion tokens 6 blocks of width 384, as nanoGPT has for Shakespeare; from there on GPT-2's smallest.
  name: gpt
  layers: {layers}
  heads: {heads}
  width: {width}
  context: {context}
  vocabulary: {-(-data.vocabulary // 64) * 64} # the data's, up to a multiple of 64, which is faster
data:
  name: text
  {_line("path", path)}

batch:
  # Windows of {context} tokens: the largest power of two with at least 20 steps an epoch, within 8 and 512.
  size: {_power_of_two(data.train / context / 20, 8, 512)}

optimizer:
  name: adamw
  learning_rate: {"6.0e-4" if large else "1.0e-3"} # nanoGPT's
  betas: [0.9, {0.95 if large else 0.99}]
  weight_decay: 0.1
  undecayed: [norm, bias]
  clip_norm: 1.0
schedule:
  name: cosine

epochs: 1 # passes over the text; more help where the test loss still falls at the end
seed: 0
"""
