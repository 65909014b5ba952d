"""Readers of data sets, their archives and photographs, and of checkpoints."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hpctrain.common.errors import HpctrainError
from support.fuzz.outside_texts import Reader, clear, write


@functools.cache
def _source() -> Mapping[str, bytes]:
    """The archives of a small ImageNet."""
    from hpctrain.common.shards.fake import FakeSet, make_fake

    with tempfile.TemporaryDirectory() as name:
        make_fake(Path(name), FakeSet(images=20, classes=2, seed=0, size=16, broken=1))
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}


@functools.cache
def _shard_files() -> Mapping[str, bytes]:
    """A folder of shards of it."""
    from hpctrain.common.shards.make import ShardRequest, make_shards

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        for file, content in _source().items():
            (source / file).write_bytes(content)
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


def _archive(content: bytes, folder: Path) -> None:
    """An archive of images, as that of a class and as that of validation."""
    from hpctrain.common.shards.image_sources import TRAIN, find_source
    from hpctrain.common.shards.listing import ValidationTar, list_part, require_distinct

    with contextlib.suppress(HpctrainError):
        path = write(folder, "val.tar", content)
        require_distinct(list_part(ValidationTar(archive=path, labels=(0, 1))))
    for name, whole in _source().items():
        (folder / name).write_bytes(content if name == TRAIN else whole)
    for part in find_source(folder).parts["train"]:
        list_part(part)


def _archives() -> Iterable[bytes]:
    return [content for name, content in _source().items() if name.endswith(".tar")]


def _devkit(content: bytes, folder: Path) -> None:
    """The development kit, or the tar in it, after whose checksum no change of the kit itself comes."""
    from hpctrain.common.shards.devkit import read_devkit

    packed = content if content[:2] == b"\x1f\x8b" else gzip.compress(content, 1)
    read_devkit(write(folder, "kit.tar.gz", packed))


def _kits() -> Iterable[bytes]:
    kits = [content for name, content in _source().items() if name.endswith(".gz")]
    return [*kits, *map(gzip.decompress, kits)]


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


def _tar() -> bytes:
    """Each kind of member that a tar can have."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
        for number, kind in enumerate(kinds):
            info = tarfile.TarInfo(f"../ILSVRC2012_val_{number:08}.JPEG" + "ä" * number * 40)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


READERS: Mapping[str, Reader] = {
    "shards": Reader(
        read=_manifest, seeds=lambda: [_shard_files()[name] for name in ("manifest.json", "train-index.npy")]
    ),
    "archive": Reader(read=_archive, seeds=lambda: [*_archives(), _tar()]),
    "devkit": Reader(read=_devkit, seeds=_kits),
    "jpeg": Reader(read=_jpeg, seeds=_photographs),
    "checkpoint": Reader(read=_checkpoint, seeds=lambda: _checkpoints().values()),
}
