"""Photographs that anybody may have made: which formats are decoded, and what the most of them takes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from hpctrain.common.shards import decoding
from hpctrain.common.shards.decoding import BrokenImageError, decode, fault, look
from support.hostile_files import cost_of, eps, png, progressive_jpeg, webp, wide_jpeg

FLOWER = Image.fromarray(load_sample_images().images[1])
LARGE = FLOWER.resize((2600, 1700))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_orientation() -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = 6
    return exif


# Kinds of files that photographs have been published as.
ODD = {
    "progressive": encoded(FLOWER, "JPEG", progressive=True),
    "rotated": encoded(FLOWER, "JPEG", exif=with_orientation()),
    "grey": encoded(FLOWER.convert("L"), "JPEG"),
    "CMYK": encoded(FLOWER.convert("CMYK"), "JPEG"),
    "progressive CMYK": encoded(FLOWER.convert("CMYK"), "JPEG", progressive=True),
    "large CMYK": encoded(LARGE.convert("CMYK"), "JPEG"),
    "two photographs": encoded(FLOWER, "MPO", save_all=True, append_images=[FLOWER]),
    "PNG": encoded(FLOWER, "PNG"),
    "RGBA": encoded(LARGE.convert("RGBA"), "PNG"),
    "palette": encoded(FLOWER.convert("P"), "PNG"),
    "palette with transparency": encoded(LARGE.convert("P"), "PNG", transparency=bytes(range(256))),
    "transparent colour": encoded(LARGE, "PNG", transparency=(1, 2, 3)),
    "bilevel": encoded(LARGE.convert("1"), "PNG"),
    "WebP": encoded(FLOWER, "WEBP"),
    "lossless WebP": encoded(LARGE.convert("RGBA"), "WEBP", lossless=True, method=0),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_photographs_are_decoded_as_pillow_decodes_them(kind: str) -> None:
    content = ODD[kind]
    width, height, pixels = look(content)
    if pixels is None:
        pixels = decode(content, width, height)
        # Their decoders are of different versions of libjpeg-turbo.
        off = 2
    else:
        off = 0
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    assert pixels.shape == expected.shape and (width, height) == pixels.shape[1::-1]
    assert np.abs(pixels - expected).max() <= off


@pytest.mark.parametrize("kind", ["BMP", "GIF", "TIFF", "PPM", "ICO", "PCX", "TGA"])
def test_other_formats_are_broken(kind: str) -> None:
    content = encoded(FLOWER.resize((64, 64)), kind)
    Image.open(io.BytesIO(content)).load()
    with pytest.raises(BrokenImageError):
        look(content)


def test_no_program_is_started_for_postscript(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", started.append)
    monkeypatch.setattr("subprocess.call", started.append)
    monkeypatch.setattr("subprocess.check_call", started.append)
    assert fault(eps()) is not None
    assert not started


REFUSED = {
    "a JPEG file of many pixels": lambda: wide_jpeg(16000, 12000),
    "a progressive JPEG file of many pixels": lambda: progressive_jpeg(12000, 12000, 0),
    "a PNG file of many pixels": lambda: png(13300, 13400, 1, 0),
    "an RGBA file of many pixels": lambda: png(11600, 11600),
    "a WebP file of many pixels": lambda: webp(16383, 16383),
    "a file of many bytes": lambda: wide_jpeg(64, 64) + bytes(decoding.MOST_BYTES),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bombs_are_broken_images_by_their_headers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = REFUSED[kind]()

    def decoded(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", decoded)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    with pytest.raises(BrokenImageError):
        look(content)


# Expensive ones within the limits.
LARGEST = {
    "JPEG": lambda: wide_jpeg(11585, 11585),
    "16 bits": lambda: png(8192, 8192, 16, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGEST)
def test_what_is_allowed_takes_less_than_a_gigabyte(kind: str, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(LARGEST[kind]())
    program = (
        "import sys; from pathlib import Path; from hpctrain.common.shards.decoding import fault; "
        "print(fault(Path(sys.argv[1]).read_bytes()))"
    )
    cost = cost_of(program, str(tmp_path / "image"))
    assert cost.status == 0, cost.stderr
    assert 2e8 < cost.peak < 1.1e9
    assert cost.cpu < 60
