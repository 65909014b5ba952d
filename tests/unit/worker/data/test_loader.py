"""ImageNet's loader: the same samples whoever makes them, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpctrain.common.recipes.augmentation import Augmentation
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.common.shards.decoding import Header
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.worker.bench.loader_rates import Photograph, photographs, write_folders, write_shards
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data import decoder, open_sources, with_head
from hpctrain.worker.data.decoder import Cut, DecodingJob, _Random
from hpctrain.worker.data.image_loader import ImageNet, WorkerPool
from hpctrain.worker.data.images import Crop
from hpctrain.worker.data.sampling import cut, epoch_order
from hpctrain.worker.data.workers import _Worker
from support.refusals import refused

BROKEN_KEY = "n00000000_000002"


def made(folder: Path, samples: Iterable[Photograph], shard_samples: int) -> Path:
    write_folders(folder / "files", samples)
    write_shards(folder / "shards", folder / "files", shard_samples)
    return folder / "shards"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("whole"), photographs(29), 8)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six images one is broken from the beginning, and of another the first part is lost on disk."""
    samples = list(photographs(6))
    samples[5] = ("broken", samples[5][1][:30_000], 1)
    folder = made(tmp_path_factory.mktemp("damaged"), samples, 4)
    with contextlib.closing(open_shards(folder, "train")) as shards:
        index = next(index for index in range(6) if shards.key(index) == BROKEN_KEY)
        path, content = shards.where(index), shards.read(index)
    path.write_bytes(path.read_bytes().replace(content, bytes(len(content))))
    return folder


def recipe(workers: int, *, path: str | None = None, **images: object) -> Recipe:
    digits = load_recipe("digits")
    data = digits.data.model_copy(update={"name": "imagenet", "workers": workers, "path": path})
    small = digits.images.model_copy(update={"size": 64, "test_size": 56, "test_resize": 64, **images})
    return digits.model_copy(update={"data": data, "images": small})


@contextlib.contextmanager
def opened(folder: Path, split: str, settings: Recipe, pool: WorkerPool | None = None):
    pool = pool or WorkerPool(folder, settings)
    source = ImageNet(folder, split, settings, pool)
    try:
        yield source
    finally:
        pids = pids_of(pool)
        source.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def pids_of(pool: WorkerPool) -> list[int]:
    return pool._workers.pids if pool._workers else []


def seen(source: ImageNet, pieces, epoch: int = 0):
    """Images and labels of a whole stream."""
    samples = [(piece.images.copy(), piece.labels) for piece in source.stream(pieces, epoch)]
    return np.concatenate([images for images, _ in samples]), np.concatenate([labels for _, labels in samples])


@pytest.fixture(scope="module")
def reference(folder: Path):
    """Of epoch 3, one image a piece, made in this process: (images, labels) by index."""
    with opened(folder, "train", recipe(0)) as source:
        return seen(source, cut(np.arange(29), 1), epoch=3)


@pytest.fixture(scope="module")
def kept(folder: Path):
    """With two workers, which take their time to start, for tests that leave them as they were."""
    with opened(folder, "train", recipe(2)) as source:
        yield source


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_who_makes_a_sample_does_not_change_a_bit_of_it(folder, reference, workers):
    order = epoch_order(29, seed=0, epoch=3)
    with opened(folder, "train", recipe(workers)) as source:
        images, labels = seen(source, cut(order, 7), epoch=3)
        np.testing.assert_array_equal(images, reference[0][order])
        np.testing.assert_array_equal(labels, reference[1][order])
        again, _ = seen(source, cut(order, 7), epoch=4)
    assert (images != again).any(axis=(1, 2, 3)).all()


def test_images_that_are_made_together_are_those_made_alone(folder, monkeypatch):
    """Also what is drawn for them after the crops of those behind them; and files are not held without a bound."""
    settings = recipe(0, augmentation=Augmentation(name="trivial_augment_wide"))
    with opened(folder, "train", settings) as source:
        together, _ = seen(source, [np.arange(29)])
        monkeypatch.setattr(decoder, "_TOGETHER_BYTES", 0)
        alone, _ = seen(source, [np.arange(29)])
    np.testing.assert_array_equal(together, alone)
    monkeypatch.undo()
    header = Header(1, 1, pixels=np.zeros((512, 512, 3), np.uint8))
    cuts = iter([Cut(0, 0, b"", header, Crop(0, 0, 1, 1), 1, 1, flip=False, random=None)] * 40)
    assert [len(list(decoder._together(cuts))) for _ in range(3)] == [3, 3, 3]
    small = iter([next(cuts)._replace(header=Header(1, 1))] * 40)
    assert [len(list(decoder._together(small))) for _ in range(4)] == [16, 16, 8, 0]


def test_random_numbers_of_a_sample_follow_from_seed_epoch_and_index():
    random = _Random(7)
    for epoch, index, again in ((3, 5, 0), (3, 6, 0), (4, 5, 0), (3, 5, 2), (3, 5, 0)):
        counter = index << 128 | again << 192
        expected = np.random.Generator(np.random.Philox(key=epoch << 64 | 7, counter=counter))
        own = random.of(epoch, index, again)
        assert [own.random(), own.integers(7), own.normal()] == [
            expected.random(),
            expected.integers(7),
            expected.normal(),
        ]


def test_a_limit_leaves_the_first_images(folder):
    settings = recipe(0)
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"limit": 5})})
    with opened(folder, "train", settings) as few, opened(folder, "val", settings) as all_of_them:
        assert (len(few), len(all_of_them)) == (5, 2)


def test_arrays_are_good_until_the_next_is_asked_for(kept, reference):
    pieces = cut(np.arange(29), 2)
    for piece, indices in zip(kept.stream(pieces, 3), pieces, strict=True):
        time.sleep(0.02)
        np.testing.assert_array_equal(piece.images, reference[0][indices])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_stops_with_its_name(damaged, workers):
    """One that was broken when the shards were made is left out."""
    with opened(damaged, "train", recipe(workers)) as source:
        assert len(source) == 5
        with refused("HT-data-broken-image", key=BROKEN_KEY) as error:
            seen(source, cut(np.arange(5), 4))
        values = error.value.values
        assert re.search(r"train-00000\d.tar$", str(values["where"]))


def test_a_shard_cut_short_behind_ones_back_is_named(damaged, tmp_path):
    shards = shutil.copytree(damaged, tmp_path / "shards")
    with opened(shards, "train", recipe(1)) as source:
        os.truncate(shards / "train-000000.tar", 1000)
        with refused("HT-shard-damaged") as error:
            seen(source, [np.arange(4)])
        assert Path(error.value.values["path"]).name == "train-000000.tar"


@pytest.mark.slow
def test_epochs_and_streams_that_are_not_read_to_their_end_leave_no_file_open(folder):
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with opened(folder, "train", recipe(2)) as source:
        before, during = files(), set()
        for epoch in range(4):
            stream = source.stream(cut(np.arange(29), 10), epoch)
            assert sum(1 for _ in itertools.islice(stream, 1 + epoch)) == min(1 + epoch, 3)
            stream.close()
            # All shards are read from in the second.
            during |= {files()} if epoch else set()
    assert len(during) <= 2, during
    assert files() <= before


@pytest.mark.slow
def test_one_stream_at_a_time(folder, reference):
    settings = recipe(2)
    pool = WorkerPool(folder, settings)
    with opened(folder, "train", settings, pool) as source, opened(folder, "val", settings, pool) as other:
        stream = source.stream(cut(np.arange(29), 5), 3)
        first = next(stream).images.copy()
        with pytest.raises(AssertionError, match="another stream"):
            next(other.stream([np.arange(2)], 0))
        images, _ = seen(source, cut(np.arange(29), 5), 3)
        np.testing.assert_array_equal(images[: len(first)], first)
        np.testing.assert_array_equal(images, reference[0])
        assert seen(other, [np.arange(2)])[0].shape == (2, 56, 56, 3)


def test_an_unexpected_fault_in_a_worker_is_told_with_the_sample(folder, monkeypatch, capsys):
    settings = recipe(1)
    job = DecodingJob(folder=folder, seed=0, images=settings.images)
    monkeypatch.setattr(decoder, "decoded", lambda *_, **__: 1 // 0)
    with contextlib.closing(open_shards(folder, "train")) as shards:
        memory = os.memfd_create("images")
        os.truncate(memory, 1 << 20)
        monkeypatch.setattr(_Worker, "this", _Worker(job, memory), raising=False)
        with refused("HT-loader-worker-failed", f"train-000000.tar: {shards.key(7)}: ZeroDivisionError"):
            _Worker.make("train", 0, [7], 0)
        os.close(memory)
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_worker_is_told_of_and_another_stream_works(folder):
    with opened(folder, "train", recipe(1)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        pids = pids_of(source._pool)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with refused("HT-loader-worker-failed"):
            list(stream)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert len(seen(source, [np.arange(3)])[0]) == 3


@pytest.mark.slow
def test_a_worker_that_hangs_is_not_waited_for_without_end(folder):
    with opened(folder, "train", recipe(1)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        os.kill(pids_of(source._pool)[0], signal.SIGSTOP)
        # not by HPCTRAIN_TIMEOUT, since the start of the process may take longer than a test should
        source._pool._workers._timeout = 1.0
        with refused("HT-loader-timed-out", count=1, seconds=1.0):
            list(stream)


def test_signals_of_the_run_are_not_the_workers(folder):
    with opened(folder, "train", recipe(1)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            os.kill(pids_of(source._pool)[0], name)
        assert sum(len(piece) for piece in stream) == 27


_RANK = """
import sys, os, time, numpy as np
from pathlib import Path
from hpctrain.worker.data.image_loader import ImageNet
from hpctrain.common.recipes.schema import Recipe
source = ImageNet(Path(sys.argv[1]), "train", Recipe.model_validate_json(sys.argv[2]))
stream = source.stream([np.arange(4)] * 1000, 0)
next(stream)
print(*source._pool._workers.pids, flush=True)
for piece in stream: pass
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_rank(folder):
    arguments = [sys.executable, "-c", _RANK, str(folder), recipe(2).model_dump_json()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert [psutil.Process(pid).ppid() for pid in pids] == [rank.pid] * 2
        rank.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive


def test_a_worker_imports_no_framework_and_no_mpi():
    look = (
        "import sys, hpctrain.worker.data.workers; "
        "print(*{'torch','tensorflow','keras','mpi4py','horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def test_memory_that_is_not_there_is_a_clear_error(folder):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(folder, "train", recipe(1)) as source:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with refused("HT-memory-not-available"):
                next(source.stream([np.arange(4)], 0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_sources_of_a_recipe(folder, tmp_path, capfd):
    resnet = ModelSettings(name="resnet18")
    train, test = open_sources(recipe(0, path=str(folder)).model_copy(update={"model": resnet}))
    assert (len(train), len(test)) == (29, 2)
    (piece,) = test.stream([np.arange(2)], 0)
    assert piece.images.shape == (2, 56, 56, 3)
    test.close()
    with refused("HT-recipe-needs-data-path") as error:
        open_sources(recipe(0).model_copy(update={"model": resnet}))
    assert "--set data.path=DIR" in error.value.hint
    with refused("HT-data-unfit", "recipe digits: digits_cnn"):
        open_sources(recipe(0, path=str(folder)))
    shards = shutil.copytree(folder, tmp_path / "shards")
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["classes"] = [f"n{label:08}" for label in range(1001)]
    (shards / "manifest.json").write_text(json.dumps(manifest))
    for asked, head in ((None, 1001), (1001, 1001), (1002, 1002), (1000, None)):
        given = ModelSettings(name="resnet18", classes=asked)
        many = recipe(0, path=str(shards)).model_copy(update={"model": given})
        if head is None:
            with refused("HT-data-unfit", "has 1001 classes, and model.classes gives resnet18 only 1000"):
                open_sources(many)
            continue
        train, _ = open_sources(many)
        assert with_head(many, train, SingleCommunicator("test")).model.classes == head
        # Only what the data do not have is said.
        assert bool(capfd.readouterr().err) is (head == 1002)
