"""TrivialAugment, RandAugment and random erasing: against Pillow, plain formulas and the sources' distributions."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_images

from hpctrain.common.recipes.augmentation import Augmentation, Erasing
from hpctrain.common.recipes.sections import Images
from hpctrain.worker.data.augment import OPERATIONS, Warp, augment, draw_operations, erase
from support.whole_images import training_image

WIDE = Augmentation(name="trivial_augment_wide")
RAND = Augmentation(
    name="rand_augment_increasing", magnitude=7, deviation=0.5, interpolation="bicubic", fill=(124, 116, 104)
)
FLOWER = Image.fromarray(load_sample_images().images[1]).resize((176, 176))
PIXELS = np.asarray(FLOWER).astype(float)

# Of torchvision at commit 0352a47a, transforms/autoaugment.py, TrivialAugmentWide: the largest magnitude, and whether
# it has a sign.
WIDE_SPACE = {
    "identity": (0, False),
    "shear_x": (0.99, True),
    "shear_y": (0.99, True),
    "translate_x": (32, True),
    "translate_y": (32, True),
    "rotate": (135, True),
    "brightness": (0.99, True),
    "color": (0.99, True),
    "contrast": (0.99, True),
    "sharpness": (0.99, True),
    "posterize": (None, False),
    "solarize": (None, False),
    "auto_contrast": (0, False),
    "equalize": (0, False),
}
ENHANCED = ("brightness", "color", "contrast", "sharpness")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def done(name: str, argument: float, settings: Augmentation = WIDE) -> np.ndarray:
    return np.asarray(OPERATIONS[name](FLOWER, argument, Warp(settings))).astype(float)


def bilinear(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The flower where the middles of pixels come from (x, y), black outside."""
    columns, rows = np.floor(x - 0.5), np.floor(y - 0.5)
    dx, dy = (x - 0.5 - columns)[..., None], (y - 0.5 - rows)[..., None]

    def at(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        return PIXELS[row.clip(0, 175).astype(int), column.clip(0, 175).astype(int)]

    top = at(rows, columns) * (1 - dx) + at(rows, columns + 1) * dx
    bottom = at(rows + 1, columns) * (1 - dx) + at(rows + 1, columns + 1) * dx
    inside = (x >= 0) & (x < 176) & (y >= 0) & (y < 176)
    return np.where(inside[..., None], top * (1 - dy) + bottom * dy, 0)


@pytest.mark.parametrize("name", ["shear_x", "shear_y", "translate_x", "translate_y", "rotate"])
@pytest.mark.parametrize("share", [-1.0, -0.4, 0.3, 1.0])
def test_moved_pixels_come_from_where_torchvisions_matrices_say(name, share):
    argument = share * WIDE_SPACE[name][0]
    if "translate" in name:
        argument = int(argument)
    y, x = np.mgrid[:176, :176] + 0.5
    if name == "shear_x":
        x = x + argument * y
    elif name == "shear_y":
        y = y + argument * x
    elif name == "translate_x":
        x = x - argument
    elif name == "translate_y":
        y = y - argument
    else:
        cos, sin = math.cos(math.radians(argument)), math.sin(math.radians(argument))
        x, y = 88 + cos * (x - 88) - sin * (y - 88), 88 + sin * (x - 88) + cos * (y - 88)
    found, expected = done(name, argument), bilinear(x, y)
    # Pillow rounds down, and in fixed point; at the edge a pixel may be in or out.
    assert np.mean(np.abs(found - expected) > 2) < 0.01


def levels(share: float, black: np.ndarray | float) -> np.ndarray:
    return np.clip(black + share * (PIXELS - black), 0, 255)


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.99])
def test_enhanced_images_lie_on_the_line_from_what_pillow_takes_away(factor):
    grey = np.asarray(FLOWER.convert("L")).astype(float)
    np.testing.assert_allclose(done("brightness", factor), levels(factor, 0.0), atol=1)
    np.testing.assert_allclose(done("color", factor), levels(factor, grey[:, :, None]), atol=1)
    np.testing.assert_allclose(done("contrast", factor), levels(factor, int(grey.mean() + 0.5)), atol=1)
    smooth = PIXELS.copy()
    parts = [
        PIXELS[1 + i : 175 + i, 1 + j : 175 + j] * (5 if i == j == 0 else 1) for i in (-1, 0, 1) for j in (-1, 0, 1)
    ]
    smooth[1:-1, 1:-1] = sum(parts) / 13
    np.testing.assert_allclose(done("sharpness", factor), levels(factor, np.rint(smooth)), atol=2)


def test_levels_are_mapped_as_the_papers_say():
    for bits in (0, 2, 4, 8):
        np.testing.assert_array_equal(done("posterize", bits), PIXELS // 2 ** (8 - bits) * 2 ** (8 - bits))
    for level in (0, 76.5, 255, 256):
        np.testing.assert_array_equal(done("solarize", level), np.where(level > PIXELS, PIXELS, 255 - PIXELS))
    np.testing.assert_array_equal(
        done("solarize_add", 77), np.where(PIXELS < 128, np.minimum(PIXELS + 77, 255), PIXELS)
    )
    np.testing.assert_array_equal(done("invert", 0), 255 - PIXELS)
    low, high = PIXELS.min(axis=(0, 1)), PIXELS.max(axis=(0, 1))
    np.testing.assert_allclose(done("auto_contrast", 0), (PIXELS - low) * 255 / (high - low), atol=1)
    np.testing.assert_array_equal(done("equalize", 0), np.asarray(ImageOps.equalize(FLOWER)))
    np.testing.assert_array_equal(done("identity", 0), PIXELS)


def magnitudes(name: str) -> set[float]:
    """The arguments that torchvision can come to."""
    torch = pytest.importorskip("torch")
    if name == "posterize":
        return set((8 - (torch.arange(31) / 5).round().int()).tolist())
    if name == "solarize":
        return set(torch.linspace(255.0, 0.0, 31).tolist())
    largest, signed = WIDE_SPACE[name]
    found = torch.linspace(0.0, largest, 31).tolist()
    found += [-each for each in found] if signed else []
    if "translate" in name:
        return {int(each) for each in found}
    return {1 + each for each in found} if name in ENHANCED else set(found)


def test_trivial_augment_draws_uniformly_from_torchvisions_space():
    random, found = rng(4), collections.defaultdict(list)
    for _ in range(14 * 31 * 2 * 20):
        ((name, argument),) = draw_operations(WIDE, 176, random)
        found[name].append(argument)
    assert found.keys() == WIDE_SPACE.keys()
    assert stats.chisquare([len(each) for each in found.values()]).pvalue > 1e-3
    for name, arguments in found.items():
        expected = sorted(magnitudes(name))
        np.testing.assert_allclose(sorted(set(np.round(arguments, 9) + 0.0)), expected, atol=1e-5, err_msg=name)
        if name in ("rotate", "shear_x", "brightness", "color"):
            middle = 1 if name in ENHANCED else 0
            counts = collections.Counter(np.round(np.array(arguments) - middle, 9) + 0.0)
            counts[0.0] /= 2
            assert (
                stats.chisquare(list(counts.values()), len(arguments) / 62 * np.ones(61) + 0, sum_check=False).pvalue
                > 1e-3
            )
        if name == "posterize":
            # round(i / 5) of 31 bins
            counts = collections.Counter(arguments)
            shares = np.array([3, 5, 5, 5, 5, 5, 3]) / 31
            assert stats.chisquare([counts[8 - i] for i in range(7)], len(arguments) * shares).pvalue > 1e-3
        if name == "solarize":
            assert stats.chisquare(list(collections.Counter(arguments).values())).pvalue > 1e-3


def timms(name: str, level: float, sign: int) -> float:
    """The argument of timm's increasing transforms for a level from 0 to 10, on 160 pixels."""
    match name:
        case "rotate":
            return sign * level / 10 * 30
        case "posterize":
            return 4 - int(level / 10 * 4)
        case "solarize":
            return 256 - int(level / 10 * 256)
        case "solarize_add":
            return int(level / 10 * 110)
        case "shear_x" | "shear_y":
            return sign * level / 10 * 0.3
        case "translate_x" | "translate_y":
            return sign * level / 10 * 0.45 * 160
        case "auto_contrast" | "equalize" | "invert":
            return 0.0
    return max(0.1, 1 + sign * level / 10 * 0.9)


def test_rand_augment_draws_as_timm_does():
    random, counts, sizes = rng(5), collections.Counter(), collections.Counter()
    rotations, shifts = [], []
    for _ in range(12_000):
        found = draw_operations(RAND, 160, random)
        sizes[len(found)] += 1
        counts.update(name for name, _ in found)
        rotations += [argument for name, argument in found if name == "rotate"]
        shifts += [argument for name, argument in found if name == "translate_x"]
    assert len(counts) == 15
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    # Each of two is done with probability one half.
    assert stats.chisquare([sizes[0], sizes[1], sizes[2]], [3000, 6000, 3000]).pvalue > 1e-3
    assert stats.kstest(np.abs(rotations) / 3, stats.norm(7, 0.5).cdf).pvalue > 1e-3
    assert stats.binomtest(sum(each > 0 for each in rotations), len(rotations)).pvalue > 1e-3
    assert stats.kstest(np.abs(shifts) / 7.2, stats.norm(7, 0.5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("magnitude", [0.0, 3.0, 6.0, 7.0, 10.0])
def test_rand_augments_magnitudes_are_timms(magnitude):
    settings = Augmentation(name="rand_augment_increasing", magnitude=magnitude)
    random = rng(6)
    seen = {found for _ in range(600) for found in draw_operations(settings, 160, random)}
    assert len({name for name, _ in seen}) == 15
    for name, argument in seen:
        possible = [timms(name, magnitude, sign) for sign in (1, -1)]
        assert any(argument == pytest.approx(each, abs=1e-12) for each in possible), name


def test_what_nothing_is_moved_to_has_the_fill():
    corner = np.asarray(OPERATIONS["translate_x"](FLOWER, 30, Warp(RAND)))[:, :28]
    assert (corner == (124, 116, 104)).all()


COLOUR = np.array([124, 116, 104], np.uint8)
GREY = np.full((100, 120, 3), 7, np.uint8)


def torchvisions_box(random: np.random.Generator) -> tuple[int, int]:
    """Height and width, as torchvision's RandomErasing.get_params draws them."""
    for _ in range(10):
        area = 100 * 120 * random.uniform(0.02, 0.33)
        ratio = math.exp(random.uniform(math.log(0.3), math.log(3.3)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < 100 and width < 120:
            return height, width
    return 0, 0


@pytest.mark.long
def test_erased_rectangles_are_distributed_as_torchvisions():
    settings, random, other = Erasing(probability=0.25), rng(1), rng(2)
    boxes = []
    for _ in range(8000):
        found = erase(GREY, settings, COLOUR, random)
        rows, columns = np.nonzero((found != 7).any(axis=2))
        if len(rows):
            top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
            assert len(rows) == (bottom - top) * (right - left) and (found[top, left] == COLOUR).all()
            boxes.append((top, bottom, left, right))
    assert stats.binomtest(len(boxes), 8000, 0.25).pvalue > 1e-3
    top, bottom, left, right = np.array(boxes).T
    reference = np.array([torchvisions_box(other) for _ in range(4000)])
    assert stats.ks_2samp((bottom - top) * (right - left), reference.prod(axis=1)).pvalue > 1e-3
    assert stats.ks_2samp((bottom - top) / (right - left), reference[:, 0] / reference[:, 1]).pvalue > 1e-3
    assert stats.kstest((top + rng(3).random(len(top))) / (101 - (bottom - top)), "uniform").pvalue > 1e-3
    assert stats.kstest((left + rng(4).random(len(top))) / (121 - (right - left)), "uniform").pvalue > 1e-3


def test_a_training_image_is_augmented_behind_crop_and_flip_and_erased_last():
    import io

    file = io.BytesIO()
    FLOWER.save(file, "PNG")
    plain = Images(size=64)
    erasing = Erasing(probability=1)
    everything = plain.model_copy(update={"augmentation": WIDE, "erasing": erasing})
    for seed in range(20):
        random = rng(seed)
        expected = training_image(file.getvalue(), 64, plain, random)
        expected = augment(expected, WIDE, random)
        expected = erase(expected, erasing, COLOUR, random)
        np.testing.assert_array_equal(training_image(file.getvalue(), 64, everything, rng(seed)), expected)
