"""Readers of data sets, their archives and photographs, of tokenisers, and of checkpoints."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import json
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

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
    from hpctrain.common.shards.read import open_shards

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
    from hpctrain.common.shards.archives import TRAIN, find_source
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


# Of processor time for a damaged file of some kilobytes, and of memory beyond what its process has.
_SECONDS = 2
_MEMORY = 500_000_000
_END = "<|end|>"


def _limited(read: Callable[[Path], object], path: Path) -> None:
    """Read in this process with the limits; the signal at the end of the time is no fault of a library."""
    from hpctrain.common.shards.bounded import memory_limit

    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        with memory_limit(_MEMORY):
            read(path)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _confined(read: Callable[[Path], object], path: Path) -> None:
    """Read as the commands do, in another process: what ends it within its limits is an error that names the file."""
    from hpctrain.common.shards.confined import call_confined

    try:
        call_confined(_limited, read, path)
    except HpctrainError as error:
        if error.exit_code == 1:
            raise AssertionError(error.message) from error
        raise


def read_image_set(folder: Path) -> None:
    """A folder of Parquet files: all that a set of shards takes of it."""
    from hpctrain.common.shards.archives import find_source
    from hpctrain.common.shards.listing import list_part
    from hpctrain.common.shards.parquet import read_rows

    for part in find_source(folder).parts["train"]:
        for member in list_part(part)[:3]:
            for _ in read_rows(Path(member.file), "image", [member.offset]):
                pass


def _parquet(content: bytes, folder: Path) -> None:
    """A Parquet file of train, beside one of val."""
    clear(folder)
    write(folder, "val.parquet", next(iter(_parquets())))
    write(folder, "train.parquet", content)
    _confined(read_image_set, folder)


@functools.cache
def _parquets() -> Iterable[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    images = [bytes([number]) * 20 for number in range(6)]
    names = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"]}}}})}
    numbers = pa.array([0, 1, 0, 1, 1, 0], pa.int64())
    structs = pa.array([{"bytes": image, "path": "a"} for image in images])
    tables = [
        pa.table({"image": pa.array(images, pa.binary()), "label": numbers}),
        pa.table({"image": structs, "label": numbers}).replace_schema_metadata(names),
        pa.table({"image": pa.array(images, pa.large_binary()), "label": numbers.cast(pa.int8())}),
        pa.table({"image": pa.array(images, pa.binary()), "label": pa.array([*"010110"]).dictionary_encode()}),
    ]
    ways: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "snappy", "row_group_size": 2},
        {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": False},
        {"compression": "gzip", "write_page_index": True, "write_page_checksum": True},
    ]
    buffers = []
    for table in tables:
        for way in ways:
            parquet.write_table(table, buffer := io.BytesIO(), **way)
            buffers.append(buffer.getvalue())
    return buffers


def encode_some_texts(path: Path) -> None:
    """Read a tokenizer.json, and use it."""
    from hpctrain.common.shards.text.tokenizer import open_tokenizer

    open_tokenizer(str(path), _END).tokens(
        ["", "the quick brown fox", f"a\tB{_END} \u4e2d\u6587 \U0001f600 0123 don't"]
    )


def _tokenizer(content: bytes, folder: Path) -> None:
    _confined(encode_some_texts, write(folder, "tokenizer.json", content))


def _tokenizers() -> Iterable[bytes]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz \u0120")}
    scores = [("<unk>", 0.0), *((letter, -float(number)) for letter, number in letters.items())]
    pairs = {**letters, "th": 40, "the": 41}
    for model, normal, cut, after in (
        (models.WordLevel({"the": 0, "fox": 1, "?": 2}, "?"), normalizers.NFKC(), pre_tokenizers.Whitespace(), None),
        (models.BPE(pairs, [("t", "h"), ("th", "e")]), None, pre_tokenizers.ByteLevel(), processors.ByteLevel()),
        (
            models.BPE(pairs, [("t", "h")], unk_token="a", byte_fallback=True, dropout=None),
            normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_"), normalizers.Strip()]),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Split("o", "isolated")]),
            None,
        ),
        (models.Unigram(scores, 0), normalizers.Lowercase(), pre_tokenizers.Metaspace(), None),
        (
            models.WordPiece({**letters, "[UNK]": 50, "##e": 51}, unk_token="[UNK]"),
            normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
            processors.TemplateProcessing("$A", None, []),
        ),
    ):
        tokenizer = Tokenizer(model)
        if normal:
            tokenizer.normalizer = normal
        tokenizer.pre_tokenizer = cut
        if after:
            tokenizer.post_processor = after
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(_END, special=True)])
        tokenizer.add_tokens([AddedToken("quick", lstrip=True, single_word=True)])
        yield tokenizer.to_str().encode()


READERS: Mapping[str, Reader] = {
    "shards": Reader(
        read=_manifest, seeds=lambda: [_shard_files()[name] for name in ("manifest.json", "train-index.npy")]
    ),
    "archive": Reader(read=_archive, seeds=lambda: [*_archives(), _tar()]),
    "devkit": Reader(read=_devkit, seeds=_kits),
    "jpeg": Reader(read=_jpeg, seeds=_photographs),
    "parquet": Reader(read=_parquet, seeds=_parquets),
    "tokenizer": Reader(read=_tokenizer, seeds=_tokenizers),
    "checkpoint": Reader(read=_checkpoint, seeds=lambda: _checkpoints().values()),
}
