"""A small set of photographs to measure loaders with, as shards and as a folder of files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpctrain.data.manifest import INDEX_ROW, MANIFEST, Manifest, Settings, ShardFile, Split
from hpctrain.data.shards import Shards, index_path

_WIDTH, _HEIGHT = 500, 375
# At which a file of this size takes about as many bytes as ImageNet's do on average, 110 kB.
_QUALITY = 98

# Key, the bytes of its file, and its label.
Photograph = tuple[str, bytes, int]


def photographs(count: int, seed: int = 0) -> Iterator[Photograph]:
    """JPEG files of 500 x 375 pixels: parts of the two photographs that scikit-learn brings along."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(seed)
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(count):
        label = number % len(whole)
        width = int(random.integers(_WIDTH * 4 // 5, 569))
        height = width * _HEIGHT // _WIDTH
        left, top = (int(random.integers(room)) for room in (641 - width, 428 - height))
        box = (left, top, left + width, top + height)
        file = io.BytesIO()
        whole[label].resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS, box).save(file, "JPEG", quality=_QUALITY)
        yield f"{number:06}", file.getvalue(), label


def write_shards(folder: Path, splits: Mapping[str, Sequence[Photograph]], shard_samples: int = 1000) -> None:
    """What ``hpctrain data shard`` would make of them, less the records by which it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(source="photographs", listing="", seed=0, shard_bytes=None, shard_samples=shard_samples)
    labels = max(label for samples in splits.values() for _, _, label in samples) + 1
    manifest = Manifest(
        classes=tuple(f"n{label:08}" for label in range(labels)),
        splits={split: _write_split(folder, split, samples, shard_samples) for split, samples in splits.items()},
        broken=(),
        settings=settings,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())


def write_files(shards: Shards, folder: Path) -> list[tuple[Path, int]]:
    """The images of shards as files in a folder a class, as torchvision's ImageFolder has them, with their labels."""
    files = []
    for index, label in enumerate(shards.labels.tolist()):
        file = folder / shards.classes[label] / f"{shards.key(index)}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(shards.read(index))
        files.append((file, label))
    return files


def _write_split(folder: Path, split: str, samples: Sequence[Photograph], shard_samples: int) -> Split:
    rows, shards = [], []
    for number, start in enumerate(range(0, len(samples), shard_samples)):
        part = samples[start : start + shard_samples]
        path = folder / f"{split}-{number:06}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, content, label in part:
                _add(tar, f"{key}.cls", str(label).encode())
                offset = _add(tar, f"{key}.jpg", content)
                rows.append((number, offset, len(content), label, key.encode()))
        whole = path.read_bytes()
        digest = hashlib.sha256(whole).hexdigest()
        shards.append(ShardFile(name=path.name, samples=len(part), bytes=len(whole), sha256=digest))
    index = index_path(folder, split)
    np.save(index, np.array(rows, INDEX_ROW))
    return Split(
        samples=len(samples),
        bytes=sum(shard.bytes for shard in shards),
        index_sha256=hashlib.sha256(index.read_bytes()).hexdigest(),
        shards=tuple(shards),
    )


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Returns where the content begins."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    offset = tar.offset + tarfile.BLOCKSIZE
    tar.addfile(member, io.BytesIO(content))
    return offset
