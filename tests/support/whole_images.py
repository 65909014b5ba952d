"""One photograph from the bytes of its file to its pixels, by the steps that a decoder takes for many together."""

from __future__ import annotations

import numpy as np

from hpctrain.common.recipes.sections import Images
from hpctrain.common.shards.decoding import Pixels, look
from hpctrain.worker.data.images import changed, decoded, middle, training_crop, validation_crop


def training_image(content: bytes, size: int, images: Images, random: np.random.Generator) -> Pixels:
    """A random part of a photograph, changed at random, of shape (size, size, 3).

    Raises:
        BrokenImageError: it cannot be decoded.
    """
    header = look(content)
    crop, flip = training_crop(header, images, random)
    return changed(decoded(content, header, crop, size, size), size, images, random, flip=flip)


def validation_image(content: bytes, images: Images) -> Pixels:
    """The middle of a photograph whose shorter side was made ``test_resize``, of shape (test_size, test_size, 3).

    Raises:
        BrokenImageError: it cannot be decoded.
    """
    header = look(content)
    crop, wide, high = validation_crop(header, images)
    return middle(decoded(content, header, crop, wide, high), wide, high, images.test_size)
