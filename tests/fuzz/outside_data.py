"""Readers of data sets, their photographs, and of checkpoints."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fuzz.outside_texts import Reader, clear
from hpctrain.common.errors import HpctrainError


@functools.cache
def _shard_files() -> Mapping[str, bytes]:
    """A folder of shards of a small ImageNet."""
    from hpctrain.common.shards.make import ShardRequest, make_shards
    from support.small_imagenet import write_images

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_images(source, images=20, classes=2, size=16, broken=1)
        folder = Path(name) / "shards"
        make_shards(ShardRequest(source=source, folder=folder, shard_samples=50), map, lambda words: None)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _manifest(content: bytes, folder: Path) -> None:
    """A folder of shards with another manifest, or with another index if it begins as one."""
    from hpctrain.common.shards.image_shards import open_shards

    clear(folder)
    for name, whole in _shard_files().items():
        (folder / name).write_bytes(whole)
    (folder / ("train-index.npy" if content[:1] == b"\x93" else "manifest.json")).write_bytes(content)
    for split in ("train", "val"):
        with contextlib.suppress(HpctrainError):
            shards = open_shards(folder, split)
            try:
                for index in range(min(len(shards), 30)):
                    shards.read(index)
                    shards.key(index)
            finally:
                shards.close()


def _jpeg(content: bytes, _: Path) -> None:
    from hpctrain.common.recipes.sections import Images
    from hpctrain.common.shards.decoding import BrokenImageError, fault
    from support.whole_images import training_image, validation_image

    images = Images(size=32, test_size=32, test_resize=36)
    fault(content)
    with contextlib.suppress(BrokenImageError):
        training_image(content, 32, images, np.random.default_rng(0))
    with contextlib.suppress(BrokenImageError):
        validation_image(content, images)


def _photographs() -> Iterable[bytes]:
    from PIL import Image

    pixels = Image.effect_noise((24, 16), 50)
    for form, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("BMP", "RGB")):
        buffer = io.BytesIO()
        pixels.convert(mode).save(buffer, form)
        yield buffer.getvalue()


def _checkpoint(content: bytes, folder: Path) -> None:
    """A checkpoint of two ranks with another manifest, if it begins with a brace, or with another first share."""
    from hpctrain.common.checkpoints.find import newest_whole, verify
    from hpctrain.common.checkpoints.layout import checkpoint_path, share_name
    from hpctrain.common.checkpoints.manifest import MANIFEST, SUM
    from hpctrain.common.checkpoints.read import read_state

    clear(folder)
    path = checkpoint_path(folder, 3)
    path.mkdir()
    for name, whole in _checkpoints().items():
        (path / name).write_bytes(whole)
    (path / (MANIFEST if content[:1] == b"{" else share_name(0, 2))).write_bytes(content)
    digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    (path / SUM).write_text(f"{digest}  {MANIFEST}\n")
    verify(path)
    newest_whole(folder)
    for ranks in (2, 3):
        with contextlib.suppress(HpctrainError):
            dict(read_state(path, 0, ranks)[1])


@functools.cache
def _checkpoints() -> Mapping[str, bytes]:
    """The files of one."""
    from support.written_checkpoints import progress_of, write_checkpoint

    shares = [
        {
            name: np.zeros((2, 3), np.float32),
            f"divided[{rank}:{rank + 1},0:3 of 2,3]": np.ones((1, 3), np.float32),
            f"random.numpy.{rank}": np.arange(5, dtype=np.uint8),
            f"statistics.mean.{rank}": np.ones(3, np.float32),
        }
        for rank, name in enumerate(("weight", "bias"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), progress_of(3, ranks=2), *shares)
        return {file.name: file.read_bytes() for file in path.iterdir()}


READERS: Mapping[str, Reader] = {
    "shards": Reader(
        read=_manifest, seeds=lambda: [_shard_files()[name] for name in ("manifest.json", "train-index.npy")]
    ),
    "jpeg": Reader(read=_jpeg, seeds=_photographs),
    "checkpoint": Reader(read=_checkpoint, seeds=lambda: _checkpoints().values()),
}
