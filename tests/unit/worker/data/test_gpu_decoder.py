"""Decoding on a GPU, as far as a processor can show it: simplejpeg stands for nvJPEG, and the rest is as on a card."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.decoding import Header
from hpctrain.worker.bench.loader_rates import Photograph, photographs, write_folders, write_shards
from hpctrain.worker.data import gpu_decoder
from hpctrain.worker.data.gpu_decoder import CardPool, Cut, resized
from hpctrain.worker.data.image_loader import ImageNet, Pool
from hpctrain.worker.data.images import Crop
from hpctrain.worker.data.sampling import cut
from support.refusals import refused

CPU = torch.device("cpu")
GPU = torch.cuda.is_available() and importlib.util.find_spec("torchvision") is not None
FLOWER = load_sample_images().images[1]
calls: list[list[type]] = []


def by_simplejpeg(contents: Sequence[bytes], device: torch.device) -> list[torch.Tensor]:
    """What nvJPEG does: a tensor for each file, and an error for all of them if one cannot be decoded."""
    calls.append([type(each) for each in contents])
    try:
        return [torch.from_numpy(simplejpeg.decode_jpeg(each)).permute(2, 0, 1) for each in contents]
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def encoded(kind: str, image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of several shapes and kinds."""
    samples: list[Photograph] = list(photographs(6))
    large = Image.fromarray(FLOWER).resize((1300, 867))
    samples.append(("large", encoded("JPEG", large), 0))
    samples.append(("tall", encoded("JPEG", Image.fromarray(FLOWER).rotate(90, expand=True)), 0))
    samples.append(("png", encoded("PNG", Image.fromarray(FLOWER)), 0))
    samples.append(("cmyk", encoded("JPEG", Image.fromarray(FLOWER).convert("CMYK")), 0))
    samples.append(("grey", encoded("JPEG", Image.fromarray(FLOWER).convert("L")), 0))
    root = tmp_path_factory.mktemp("card")
    write_folders(root / "files", samples)
    write_shards(root / "shards", root / "files", 8)
    return root / "shards"


def recipe(workers: int = 0) -> Recipe:
    digits = load_recipe("digits")
    data = digits.data.model_copy(update={"name": "imagenet", "workers": workers})
    changed = digits.images.model_copy(update={"size": 160, "test_size": 112, "test_resize": 128})
    return digits.model_copy(update={"data": data, "images": changed})


def seen(folder: Path, split: str, settings: Recipe, pool: Pool | None) -> tuple[np.ndarray, np.ndarray]:
    with contextlib.closing(ImageNet(folder, split, settings, pool)) as source:
        pieces = list(source.stream(cut(np.arange(len(source)), 5), 2))
        images = np.concatenate([np.asarray(piece.images) for piece in pieces])
        return images, np.concatenate([piece.labels for piece in pieces])


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((one.astype(float) - other) ** 2))))


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_card_makes_the_images_of_the_processor(folder, split):
    settings = recipe()
    expected, labels = seen(folder, split, settings, None)
    found, labels_found = seen(folder, split, settings, CardPool(folder, settings, CPU, by_simplejpeg))
    np.testing.assert_array_equal(labels_found, labels)
    assert found.dtype == np.uint8 and found.shape == expected.shape
    alike = [psnr(*pair) for pair in zip(found, expected, strict=True)]
    # Of another crop or a mirrored one it is 10 to 18.
    assert min(alike) > 26 and np.median(alike) > 33


def test_processes_read_what_the_card_decodes(folder):
    """Also files that are larger than their place in the memory, and those that the processor decodes."""
    expected, labels = seen(folder, "train", recipe(), CardPool(folder, recipe(), CPU, by_simplejpeg))
    calls.clear()
    found, labels_found = seen(folder, "train", recipe(), CardPool(folder, recipe(3), CPU, by_simplejpeg))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(labels_found, labels)
    assert {kind for kinds in calls for kind in kinds} == {bytes, memoryview}


def test_a_piece_is_decoded_before_workers_use_its_memory_again(folder, monkeypatch):
    """They do when the next piece is asked for."""
    pool = CardPool(folder, recipe(), CPU, by_simplejpeg)
    make, made, unmade = pool._made, [], []
    monkeypatch.setattr(pool, "_made", lambda *arguments: made.append(make(*arguments)) or made[-1])

    def pieces():
        for number in range(3):
            unmade.append(number - len(made))
            yield np.arange(number, number + 3)

    with contextlib.closing(ImageNet(folder, "train", recipe(), pool)) as source:
        assert len(list(source.stream(pieces(), 2))) == 3
    assert unmade == [0, 0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_is_broken_is_named(folder, tmp_path, workers):
    """The card refuses it in few calls, the processor names it, and the pool then makes other images."""
    shutil.copytree(folder, tmp_path / "shards")
    settings = recipe(workers)
    pool = CardPool(tmp_path / "shards", settings, CPU, by_simplejpeg)
    with contextlib.closing(ImageNet(tmp_path / "shards", "train", settings, pool)) as source:
        name, shard = source._shards.key(6), source._shards.where(6)
        whole, content = shard.read_bytes(), source._shards.read(6)
        middle = whole.index(content) + len(content) // 2
        shard.write_bytes(whole[:middle] + b"\xff\xd8" * 64 + whole[middle + 128 :])
        calls.clear()
        with refused("HT-data-broken-image", name):
            list(source.stream([np.append(np.tile([0, 1, 2], 10), 6)], 2))
        assert len(calls[0]) > 20 and 1 < len(calls) <= 1 + 2 * np.ceil(np.log2(len(calls[0])))
        assert [len(piece.images) for piece in source.stream([np.arange(2), np.arange(3, 5)], 2)] == [2, 2]


@pytest.mark.parametrize("size", [(40, 30), (96, 96), (300, 210), (900, 700)])
@pytest.mark.parametrize("flip", [False, True])
def test_resizing_is_pillows(size, flip):
    image = Image.fromarray(FLOWER).resize((1000, 800))
    crops = [Crop(left=0, top=0, width=size[0], height=size[1]), Crop(left=90, top=80, width=size[0], height=size[1])]
    photograph = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    cuts = [Cut(0, 0, b"", Header(1000, 800), crop=crop, width=96, height=96, flip=flip, random=None) for crop in crops]
    found = resized([photograph, photograph], cuts, 96).numpy()
    for one, crop in zip(found, crops, strict=True):
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        expected = np.asarray(image.crop(box).resize((96, 96), Image.Resampling.BILINEAR)).astype(int)
        # Pillow rounds between rows and columns.
        assert np.abs(one - (expected[:, ::-1] if flip else expected)).max() <= 2


def test_the_thread_chooses_its_card_and_decodes_into_memory_that_nothing_reads(folder, monkeypatch):
    done: list[tuple[str, int]] = []

    def note(name: str) -> None:
        done.append((name, threading.get_ident()))

    def decode_all(contents: Sequence[bytes], device: torch.device) -> list[torch.Tensor]:
        note("decode")
        return by_simplejpeg(contents, device)

    settings = recipe()
    pool = CardPool(folder, settings, CPU, decode_all)
    pool._on_card = SimpleNamespace(synchronize=lambda: note("synchronise"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("set_device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(gpu_decoder, "_MOST_TOGETHER", 2 * 500 * 375)
    monkeypatch.setattr(gpu_decoder, "resized", lambda *arguments: note("resize") or resized(*arguments))
    seen(folder, "train", settings, pool)
    names = [name for name, _ in done]
    assert names[0] == "set_device" and {thread for _, thread in done} == {done[0][1]} != {threading.get_ident()}
    between = " ".join(names).split("resize")[1:-1]
    assert len(between) > 5 and all("synchronise" in words for words in between)


class _Ranks:
    """What of a communicator is asked for: this rank's place."""

    backend, host, in_host_memory, local_rank, local_size = "gloo", "n1", False, 0, 1

    def allgather_object(self, value):
        return [value]


def test_a_decoder_that_cannot_is_refused(monkeypatch):
    comm = _Ranks()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refused("HT-decode-gpu-fails", "no GPU (backend gloo)"):
        gpu_decoder.require_card(comm)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with monkeypatch.context() as broken:
        # It is missing, or does not match PyTorch.
        broken.setitem(sys.modules, "torchvision", None)
        with refused("HT-decode-gpu-fails", "on cuda:0"):
            gpu_decoder.require_card(comm)
    if not GPU:
        monkeypatch.setattr(gpu_decoder, "by_nvjpeg", by_simplejpeg)
    assert gpu_decoder.require_card(comm) == torch.device("cuda", 0)
