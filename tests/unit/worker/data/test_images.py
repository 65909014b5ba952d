"""One photograph: its pixels against Pillow's, its crops against their definition."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images

from hpctrain.common.recipes.sections import Images
from hpctrain.common.shards.decoding import BrokenImageError, decode, decode_rows, fault, look, shrunk
from hpctrain.worker.data import images as module
from hpctrain.worker.data.images import random_crop, size_at
from support.whole_images import training_image, validation_image

FLOWER = Image.fromarray(load_sample_images().images[1])


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(float) - b) ** 2)))


@pytest.mark.parametrize("size", [(320, 213), (640, 427), (1920, 1281)])
@pytest.mark.parametrize("seed", range(4))
def test_a_crop_looks_like_pillows_whatever_scale_it_was_decoded_at(size, seed):
    content = encoded(FLOWER.resize(size, Image.Resampling.LANCZOS), quality=95)
    settings = Images(flip=False)
    crop = random_crop(*size, settings, rng(seed))
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    whole = Image.open(io.BytesIO(content)).convert("RGB")
    expected = np.asarray(whole.crop(box).resize((96, 96), Image.Resampling.BILINEAR))
    found = training_image(content, 96, settings, rng(seed))
    assert found.shape == (96, 96, 3) and found.dtype == np.uint8
    # a shift by a pixel of the result, or no antialiasing, gives 12 and more
    assert rms(found, expected) < 6


def test_flip_mirrors_half_of_them():
    content = encoded(FLOWER)
    plain, flipping = Images(flip=False, crop_area=(1, 1), crop_ratio=(1.49, 1.5)), Images(crop_area=(1, 1))
    flipping = plain.model_copy(update={"flip": True})
    mirrored = 0
    for seed in range(60):
        a, b = (training_image(content, 32, settings, rng(seed)) for settings in (plain, flipping))
        mirrored += int((a[:, ::-1] == b).all())
        assert (a == b).all() or (a[:, ::-1] == b).all()
    assert 15 < mirrored < 45


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (encoded(FLOWER.convert("RGBA"), "PNG"), FLOWER),
        (encoded(Image.fromarray(np.asarray(FLOWER.convert("L")).astype(np.uint16) << 8), "PNG"), FLOWER.convert("L")),
    ],
    ids=["rgba", "16 bits"],
)
def test_odd_modes_become_rgb(content, about):
    expected = np.asarray(about.convert("RGB").resize((192, 128), Image.Resampling.BILINEAR))
    found = validation_image(content, Images(test_resize=128, test_size=128))
    assert rms(found, expected[:, 32:160]) < 12


SMALL = FLOWER.resize((500, 375), Image.Resampling.LANCZOS)
ROTATED = Image.Exif()
ROTATED[0x112] = 6


@pytest.mark.parametrize(
    ("content", "most"),
    [
        (encoded(SMALL, quality=95), 2),
        (encoded(SMALL, quality=95, exif=ROTATED), 2),
        (encoded(SMALL, quality=95, progressive=True), 2),
        (encoded(SMALL, quality=95, subsampling="4:4:4"), 2),
        (encoded(SMALL.convert("L"), quality=95), 2),
        (encoded(SMALL.convert("CMYK"), quality=95), 2),
        (encoded(SMALL.convert("LA"), "PNG"), 2),
        (encoded(SMALL.convert("P"), "PNG", transparency=3), 4),
        (encoded(SMALL, "WEBP", lossless=True), 2),
        (encoded(FLOWER.resize((1, 1)), quality=95), 0),
        (encoded(FLOWER.resize((1, 500)), quality=95), 1),
        (encoded(FLOWER.resize((7, 9)), quality=95), 1),
        (encoded(FLOWER.resize((20000, 10)), quality=95), 1),
        (encoded(FLOWER.resize((10, 20000)), quality=95), 1),
    ],
    ids=["plain", "rotated", "progressive", "4:4:4", "grey", "CMYK", "LA", "P", "WebP", *"abcde"],
)
def test_crops_of_odd_photographs_are_torchvisions(content, most):
    """torchvision's RandomResizedCrop and flip, and Resize with CenterCrop, by Pillow alone."""
    whole = Image.open(io.BytesIO(content)).convert("RGB")
    width, height = whole.size
    for seed in range(6):
        random = rng(seed)
        for _ in range(10):
            area = height * width * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
                break
        else:
            w, h = width, height
            if width / height < 3 / 4:
                h = round(width / (3 / 4))
            elif width / height > 4 / 3:
                w = round(height * (4 / 3))
            left, top = (width - w) // 2, (height - h) // 2
        cut = whole.crop((left, top, left + w, top + h)).resize((224, 224), Image.Resampling.BILINEAR)
        expected = np.asarray(cut)[:, ::-1] if random.random() < 0.5 else np.asarray(cut)
        header = look(content)
        crop, flip = module.training_crop(header, Images(), rng(seed))
        for exact, more in ((True, 0), (False, 1)):
            part = module.decoded(content, header, crop, 224, 224, exact=exact)
            place = np.zeros((224, 224, 3), np.uint8)
            assert module.changed(part, 224, Images(), rng(), flip=flip, out=place) is place
            assert rms(place, expected) <= most + more
        np.testing.assert_array_equal(training_image(content, 224, Images(), rng(seed)), place)
    scale = 256 / min(width, height)
    wide, high = (max(256, int(side * scale)) for side in (width, height))
    left, top = round((wide - 224) / 2), round((high - 224) / 2)
    box = (left * width / wide, top * height / high, (left + 224) * width / wide, (top + 224) * height / high)
    middle = whole.resize((224, 224), Image.Resampling.BILINEAR, box)
    assert rms(validation_image(content, Images()), np.asarray(middle)) <= most


@pytest.mark.parametrize("keep", [0, 10, 3000, 0.5])
def test_what_is_no_image_or_ends_too_early_is_broken(keep):
    content = encoded(FLOWER)
    content = content[: int(keep * len(content)) if isinstance(keep, float) else keep]
    for make in (lambda: training_image(content, 64, Images(), rng()), lambda: validation_image(content, Images())):
        with pytest.raises(BrokenImageError) as caught:
            make()
        assert str(caught.value)


STORED = {
    "4:2:0": encoded(FLOWER, quality=95, subsampling="4:2:0"),
    "4:2:2": encoded(FLOWER, quality=95, subsampling="4:2:2"),
    "4:4:4": encoded(FLOWER, quality=95, subsampling="4:4:4"),
    "grey": encoded(FLOWER.convert("L"), quality=95),
    "a thumbnail": encoded(FLOWER, comment=encoded(FLOWER.resize((40, 40)))),
    "a marker in each row": encoded(FLOWER, restart_marker_rows=1),
}


@pytest.mark.parametrize("eighths", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", STORED)
def test_rows_below_a_crop_are_left_out_and_the_others_are_those_of_the_whole(kind, eighths):
    content = STORED[kind]
    header = look(content)
    whole = decode(content, -(-header.width * eighths // 8), -(-header.height * eighths // 8))
    for bottom in (1, 40, 95, 96, 97, 250, 425, 427):
        found = decode_rows(content, header, bottom, eighths)
        rows = -(-bottom * eighths // 8)
        np.testing.assert_array_equal(found[:rows], whole[:rows])
        assert len(found) <= (bottom + 24) * eighths / 8
        assert len(found) < len(whole) or bottom > 400


@pytest.mark.parametrize("lost", [2, 1000])
def test_a_file_that_is_cut_short_is_broken_wherever_the_crop_is(lost):
    header = look(STORED["4:2:0"])
    assert len(decode_rows(STORED["4:2:0"], header, 100, 8)) == 112
    with pytest.raises(BrokenImageError):
        decode_rows(STORED["4:2:0"][:-lost], header, 100, 8)


@pytest.mark.parametrize(
    "content",
    [encoded(FLOWER, quality=95), encoded(FLOWER, "PNG"), encoded(FLOWER.convert("CMYK"), quality=95)],
    ids=["jpeg", "png", "cmyk"],
)
def test_a_photograph_is_shrunk_as_pillow_does(content):
    found = Image.open(io.BytesIO(shrunk(content, 200, 90)))
    assert (found.format, found.mode, found.size) == ("JPEG", "RGB", (300, 200))
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB").resize((300, 200), Image.Resampling.LANCZOS))
    # The error of a JPEG file of this quality; without antialiasing it is 13.
    assert rms(np.asarray(found), expected) < 5
    again = shrunk(content, 200, 50)
    assert len(again) < 0.6 * len(shrunk(content, 200, 90))


def test_small_photographs_are_not_enlarged_and_keep_their_bytes_if_these_are_few():
    content = encoded(FLOWER, quality=75)
    assert shrunk(content, FLOWER.height, 90) == content
    assert len(shrunk(content, FLOWER.height, 60)) < len(content)
    assert shrunk(content, FLOWER.height - 1, 100) != content
    found = Image.open(io.BytesIO(shrunk(encoded(FLOWER, "PNG"), 4000, 90)))
    assert (found.format, found.size) == ("JPEG", FLOWER.size)
    grey = Image.open(io.BytesIO(shrunk(encoded(FLOWER.convert("L")), 100, 90)))
    assert rms(np.asarray(grey)[:, :, 0], np.asarray(grey)[:, :, 2]) < 1
    for damaged in (content[:1000], b"no image"):
        with pytest.raises(BrokenImageError):
            shrunk(damaged, 4000, 90)


def test_a_header_that_asks_for_more_pixels_than_there_can_be_is_broken():
    content = bytearray(encoded(FLOWER))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"
    with pytest.raises(BrokenImageError) as caught:
        validation_image(bytes(content), Images())
    assert re.findall("[0-9]+", str(caught.value)) == ["65500", "65500", "134217728"]
    assert fault(bytes(content)) == str(caught.value)


def test_what_the_loader_cannot_show_is_what_sharding_calls_broken():
    whole = encoded(FLOWER)
    end = whole.rindex(b"\xff\xd9")
    kinds = [whole, encoded(FLOWER.convert("CMYK")), encoded(FLOWER, "PNG"), whole[:end] + b"\x12\x34" + whole[end:]]
    assert [fault(content) for content in kinds] == [None] * 4
    # Its message is the same wherever and whenever it is made.
    assert "JPEG" in fault(b"noise")
    assert "truncated" in fault(whole[: len(whole) // 2])


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_crops_are_inside_and_within_the_bounds(width, height, seed):
    crop = random_crop(width, height, Images(), rng(seed))
    assert crop.width >= 1 and crop.height >= 1
    assert 0 <= crop.left <= width - crop.width and 0 <= crop.top <= height - crop.height
    if min(width, height) > 100 and max(width, height) < 4 / 3 * min(width, height):
        assert 3 / 4 * 0.95 < crop.width / crop.height < 4 / 3 * 1.05
        assert 0.07 < crop.width * crop.height / (width * height) <= 1


def test_areas_and_ratios_are_drawn_uniformly():
    random = rng()
    crops = [random_crop(1000, 1000, Images(crop_area=(0.1, 0.5)), random) for _ in range(4000)]
    areas = np.array([crop.width * crop.height / 1e6 for crop in crops])
    ratios = np.log([crop.width / crop.height for crop in crops]) / np.log(4 / 3)
    # deviations of the mean: 0.0018 and 0.009
    assert abs(areas.mean() - 0.3) < 0.01 and abs(areas.std() - 0.4 / 12**0.5) < 0.01
    assert abs(ratios.mean()) < 0.05 and abs(ratios.std() - 2 / 12**0.5) < 0.05
    assert abs(np.mean([crop.left / (1000 - crop.width) for crop in crops]) - 0.5) < 0.03


def test_sizes_climb_in_steps_of_32():
    ramp = Images(size_ramp=((0, 160), (8, 192), (16, 192)))
    assert [size_at(ramp, epoch) for epoch in (0, 3, 5, 8, 12, 20)] == [160, 160, 192, 192, 192, 192]
    assert size_at(Images(size=200), 7) == 200
