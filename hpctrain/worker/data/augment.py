"""Random operations on a whole image: TrivialAugment, RandAugment and random erasing.

The operations are Pillow's own, as they are in torchvision and timm, whose spaces of operations and magnitudes these
are. Everything random comes from the generator that is passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from hpctrain.common.recipes.augmentation import Augmentation, Erasing
from hpctrain.common.shards.decoding import Pixels

_INTERPOLATION = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
# Magnitudes of TrivialAugment, from none to the largest.
_BINS = 31
# The probability with which timm's RandAugment applies each operation that it has drawn.
_PROBABILITY = 0.5
_LARGEST = 10
_TRIES = 10


class Warp:
    """Geometric operations, with the interpolation and the fill colour of an augmentation."""

    def __init__(self, settings: Augmentation) -> None:
        self._how = _INTERPOLATION[settings.interpolation]
        self._fill = settings.fill

    def affine(self, image: Image.Image, *matrix: float) -> Image.Image:
        """Each pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""
        return image.transform(image.size, Image.Transform.AFFINE, matrix, self._how, fillcolor=self._fill)

    def rotate(self, image: Image.Image, degrees: float) -> Image.Image:
        """Counter-clockwise around the middle."""
        return image.rotate(degrees, self._how, fillcolor=self._fill)


def _mapped(image: Image.Image, level: Callable[[int], int]) -> Image.Image:
    return image.point([level(each) for each in range(256)] * len(image.getbands()))


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Posterize as Pillow does, but also to 0 bits, which Pillow refuses by now."""
    return _mapped(image, lambda level: level >> 8 - bits << 8 - bits)


def _solarize_add(image: Image.Image, add: int) -> Image.Image:
    """Brighten the pixels that are darker than the middle."""
    return _mapped(image, lambda level: min(255, level + add) if level < 128 else level)


# The arguments are, in order: the shift of a row for each row below, pixels, degrees, a factor, bits, a level.
OPERATIONS: Mapping[str, Callable[[Image.Image, float, Warp], Image.Image]] = {
    "identity": lambda image, _, __: image,
    "shear_x": lambda image, by, warp: warp.affine(image, 1, by, 0, 0, 1, 0),
    "shear_y": lambda image, by, warp: warp.affine(image, 1, 0, 0, by, 1, 0),
    "translate_x": lambda image, pixels, warp: warp.affine(image, 1, 0, -pixels, 0, 1, 0),
    "translate_y": lambda image, pixels, warp: warp.affine(image, 1, 0, 0, 0, 1, -pixels),
    "rotate": lambda image, degrees, warp: warp.rotate(image, degrees),
    "brightness": lambda image, factor, _: ImageEnhance.Brightness(image).enhance(factor),
    "color": lambda image, factor, _: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor, _: ImageEnhance.Contrast(image).enhance(factor),
    "sharpness": lambda image, factor, _: ImageEnhance.Sharpness(image).enhance(factor),
    "posterize": lambda image, bits, _: _posterize(image, int(bits)),
    # Pillow only compares with the level, which need not be a whole number.
    "solarize": lambda image, level, _: ImageOps.solarize(image, level),  # type: ignore[arg-type]
    "solarize_add": lambda image, level, _: _solarize_add(image, int(level)),
    "auto_contrast": lambda image, _, __: ImageOps.autocontrast(image),
    "equalize": lambda image, _, __: ImageOps.equalize(image),
    "invert": lambda image, _, __: ImageOps.invert(image),
}

# Gives an operation's argument from its magnitude (0 to 1), a sign (1 or -1) and the side of the image in pixels.
_Argument = Callable[[float, int, int], float]


def _none(_: float, __: int, ___: int) -> float:
    return 0.0


def _times(largest: float) -> _Argument:
    return lambda share, sign, _: sign * largest * share


def _factor(largest: float) -> _Argument:
    return lambda share, sign, _: 1 + sign * largest * share


def _wide_pixels(share: float, sign: int, _: int) -> float:
    """In the middle, torch.linspace gives torchvision 15.999999 in float32, which it cuts off to whole pixels."""
    return sign * (15 if share == 0.5 else int(32 * share))


_ENHANCED = ("brightness", "color", "contrast", "sharpness")

# torchvision's TrivialAugmentWide (transforms/autoaugment.py).
_WIDE: Mapping[str, _Argument] = {
    "identity": _none,
    "shear_x": _times(0.99),
    "shear_y": _times(0.99),
    "translate_x": _wide_pixels,
    "translate_y": _wide_pixels,
    "rotate": _times(135),
    **dict.fromkeys(_ENHANCED, _factor(0.99)),
    "posterize": lambda share, _, __: 8 - round(6 * share),
    "solarize": lambda share, _, __: 255 * (1 - share),
    "auto_contrast": _none,
    "equalize": _none,
}

# timm's increasing transforms (data/auto_augment.py).
_INCREASING: Mapping[str, _Argument] = {
    "auto_contrast": _none,
    "equalize": _none,
    "invert": _none,
    "rotate": _times(30),
    "posterize": lambda share, _, __: 4 - int(4 * share),
    "solarize": lambda share, _, __: 256 - int(256 * share),
    "solarize_add": lambda share, _, __: int(110 * share),
    **dict.fromkeys(_ENHANCED, _factor(0.9)),
    "shear_x": _times(0.3),
    "shear_y": _times(0.3),
    "translate_x": lambda share, sign, size: sign * 0.45 * share * size,
    "translate_y": lambda share, sign, size: sign * 0.45 * share * size,
}


def draw_operations(settings: Augmentation, size: int, random: np.random.Generator) -> list[tuple[str, float]]:
    """Draw operations of :data:`OPERATIONS` with their arguments, to be applied in this order.

    Args:
        size: the side of the image in pixels.
    """
    if settings.name == "trivial_augment_wide":
        name = _one_of(_WIDE, random)
        return [(name, _WIDE[name](int(random.integers(_BINS)) / (_BINS - 1), _sign(random), size))]
    found = []
    for name in [_one_of(_INCREASING, random) for _ in range(settings.layers)]:
        if random.random() > _PROBABILITY:
            continue
        magnitude = settings.magnitude + settings.deviation * random.standard_normal()
        found.append((name, _INCREASING[name](min(max(magnitude, 0), _LARGEST) / _LARGEST, _sign(random), size)))
    return found


def augment(pixels: Pixels, settings: Augmentation, random: np.random.Generator) -> Pixels:
    """Apply operations that :func:`draw_operations` gives to a square image."""
    image, warp = Image.fromarray(pixels), Warp(settings)
    for name, argument in draw_operations(settings, len(pixels), random):
        image = OPERATIONS[name](image, argument, warp)
    return np.asarray(image)


def erase(pixels: Pixels, settings: Erasing, colour: Pixels, random: np.random.Generator) -> Pixels:
    """Fill a random rectangle of an image, if one is drawn, with a colour of shape (3,).

    Area and, on a logarithmic scale, ratio are uniform; after ten tries that do not fit nothing is erased, as in
    torchvision's RandomErasing.
    """
    height, width = pixels.shape[:2]
    if random.random() >= settings.probability:
        return pixels
    low, high = map(math.log, settings.ratio)
    for _ in range(_TRIES):
        area = height * width * random.uniform(*settings.area)
        ratio = math.exp(random.uniform(low, high))
        tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if tall < height and wide < width:
            top, left = int(random.integers(height - tall + 1)), int(random.integers(width - wide + 1))
            erased = pixels.copy()
            erased[top : top + tall, left : left + wide] = colour
            return erased
    return pixels


def _one_of(space: Mapping[str, _Argument], random: np.random.Generator) -> str:
    return list(space)[int(random.integers(len(space)))]


def _sign(random: np.random.Generator) -> int:
    return 1 if random.random() < 0.5 else -1
