"""ImageNet's loader: the same samples whoever makes them, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpctrain import HpctrainError
from hpctrain.bench.photographs import photographs, write_shards
from hpctrain.data import open_sources
from hpctrain.data.decoder import _Random
from hpctrain.data.loader import ImageNet
from hpctrain.data.samples import BROKEN
from hpctrain.data.sampling import cut, epoch_order, global_batches, share
from hpctrain.recipes.load import load_recipe
from hpctrain.recipes.schema import Recipe

BROKEN_KEY = "broken"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    samples = list(photographs(29))
    write_shards(folder, {"train": samples, "val": samples[:5]}, shard_samples=8)
    return folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    samples = list(photographs(6))
    cut_short = samples[4][1][:30_000]
    samples[4] = (BROKEN_KEY, cut_short, 1)
    write_shards(folder, {"train": samples, "val": samples}, shard_samples=4)
    return folder


def recipe(workers: int, *, broken: str = "stop", path: str | None = None, **images: object) -> Recipe:
    digits = load_recipe("digits")
    data = digits.data.model_copy(
        update={"name": "imagenet", "workers": workers, "broken_images": broken, "path": path}
    )
    small = digits.images.model_copy(update={"size": 64, "test_size": 56, "test_resize": 64, **images})
    return digits.model_copy(update={"data": data, "images": small})


@contextlib.contextmanager
def opened(folder: Path, split: str, settings: Recipe):
    source = ImageNet(folder, split, settings)
    try:
        yield source
    finally:
        pids = source.pids
        source.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def seen(source: ImageNet, pieces, epoch: int = 0):
    """Images and labels of a whole stream."""
    samples = [(piece.images.copy(), piece.labels) for piece in source.stream(pieces, epoch)]
    return np.concatenate([images for images, _ in samples]), np.concatenate([labels for _, labels in samples])


@pytest.fixture(scope="module")
def reference(folder: Path):
    """Of epoch 3, one image a piece, made in this process: (images, labels) by index."""
    with opened(folder, "train", recipe(0)) as source:
        return seen(source, cut(np.arange(29), 1), epoch=3)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_who_makes_a_sample_does_not_change_a_bit_of_it(folder, reference, workers):
    order = epoch_order(29, seed=0, epoch=3)
    with opened(folder, "train", recipe(workers)) as source:
        images, labels = seen(source, cut(order, 7), epoch=3)
        np.testing.assert_array_equal(images, reference[0][order])
        np.testing.assert_array_equal(labels, reference[1][order])
        again, _ = seen(source, cut(order, 7), epoch=4)
    assert (images != again).any(axis=(1, 2, 3)).all()


def test_random_numbers_of_a_sample_follow_from_seed_epoch_and_index():
    random = _Random(7)
    for epoch, index in ((3, 5), (3, 6), (4, 5), (3, 5)):
        expected = np.random.Generator(np.random.Philox(key=epoch << 64 | 7, counter=index << 128))
        own = random.of(epoch, index)
        assert [own.random(), own.integers(7), own.normal()] == [
            expected.random(),
            expected.integers(7),
            expected.normal(),
        ]


def test_every_sample_once_for_any_world_and_a_resumed_stream_is_the_rest(folder, reference):
    order = epoch_order(29, seed=0, epoch=3)
    batches = list(global_batches(order, 8, drop_last=False))
    with opened(folder, "train", recipe(2)) as source:
        for ranks in (1, 2, 3, 4):
            own = [[share(batch, rank, ranks) for batch in batches] for rank in range(ranks)]
            images = {}
            for parts in own:
                for piece, part in zip(source.stream([p.indices for p in parts], 3), parts, strict=True):
                    for index, image in zip(part.indices[: part.count], piece.images, strict=False):
                        assert index not in images
                        images[int(index)] = image.copy()
            assert sorted(images) == list(range(29))
            assert all((image == reference[0][index]).all() for index, image in images.items())
        rest, _ = seen(source, batches[2:], epoch=3)
    np.testing.assert_array_equal(rest, reference[0][np.concatenate(batches[2:])])


def test_arrays_are_good_until_the_next_is_asked_for(folder, reference):
    pieces = cut(np.arange(29), 2)
    with opened(folder, "train", recipe(4)) as source:
        for piece, indices in zip(source.stream(pieces, 3), pieces, strict=True):
            time.sleep(0.02)
            np.testing.assert_array_equal(piece.images, reference[0][indices])


@pytest.mark.parametrize("workers", [0, 2])
def test_normalised_images_are_the_bytes_less_the_mean_over_the_deviation(folder, reference, workers):
    settings = recipe(workers, as_bytes=False)
    with opened(folder, "train", settings) as source:
        images, _ = seen(source, cut(np.arange(29), 10), epoch=3)
    assert images.dtype == np.float32
    expected = (reference[0] / 255 - settings.images.mean) / settings.images.deviation
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_left_out_and_named(damaged, workers):
    with opened(damaged, "train", recipe(workers, broken="skip")) as source:
        images, labels = seen(source, cut(np.arange(6), 4))
        assert labels.tolist() == [0, 1, 0, 1, BROKEN, 1]
        assert source.broken == {BROKEN_KEY}
    mean = np.rint(np.array(recipe(0).images.mean) * 255)
    assert (images[4] == mean).all() and not (images[3] == mean).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_stops_with_its_name(damaged, workers):
    with opened(damaged, "train", recipe(workers)) as source:
        with pytest.raises(HpctrainError, match=r"train-000001.tar: broken cannot be decoded: .*truncated") as error:
            seen(source, cut(np.arange(6), 4))
        assert "data.broken_images=skip" in error.value.hint
        assert len(seen(source, [np.arange(3)])[0]) == 3


def test_a_shard_cut_short_behind_ones_back_is_named(damaged, tmp_path):
    write_shards(tmp_path, {"train": list(photographs(4)), "val": list(photographs(1))})
    with opened(tmp_path, "train", recipe(1)) as source:
        os.truncate(tmp_path / "train-000000.tar", 1000)
        with pytest.raises(HpctrainError, match=r"train-000000.tar: cut short"):
            seen(source, [np.arange(4)])


def test_a_killed_worker_is_told_of_and_another_stream_works(folder):
    with opened(folder, "train", recipe(2)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        pids = source.pids
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(HpctrainError, match=r"was killed by SIGKILL while images were waited for"):
            list(stream)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert len(seen(source, [np.arange(3)])[0]) == 3


def test_a_worker_that_hangs_is_not_waited_for_without_end(folder):
    with opened(folder, "train", recipe(1)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        os.kill(source.pids[0], signal.SIGSTOP)
        # not by HPCTRAIN_TIMEOUT, since the start of the process may take longer than a test should
        source._workers._timeout = 1.0
        with pytest.raises(HpctrainError, match=r"waited 1 s for images of the 1 workers"):
            list(stream)


def test_a_closed_stream_leaves_the_workers_to_the_next(folder, reference):
    with opened(folder, "train", recipe(2)) as source:
        for _ in range(3):
            stream = source.stream(cut(np.arange(29), 3), 0)
            next(stream)
            stream.close()
        images, _ = seen(source, cut(np.arange(29), 3), epoch=3)
    np.testing.assert_array_equal(images, reference[0])


def test_signals_of_the_run_are_not_the_workers(folder):
    with opened(folder, "train", recipe(1)) as source:
        stream = source.stream(cut(np.arange(29), 2), 0)
        next(stream)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            os.kill(source.pids[0], name)
        assert sum(len(piece) for piece in stream) == 27


_RANK = """
import sys, os, time, numpy as np
from pathlib import Path
from hpctrain.data.loader import ImageNet
from hpctrain.recipes.schema import Recipe
source = ImageNet(Path(sys.argv[1]), "train", Recipe.model_validate_json(sys.argv[2]))
stream = source.stream([np.arange(4)] * 1000, 0)
next(stream)
print(*source.pids, flush=True)
for piece in stream: pass
"""


def test_nothing_outlives_a_killed_rank(folder):
    before = set(Path("/dev/shm").iterdir())
    arguments = [sys.executable, "-c", _RANK, str(folder), recipe(2).model_dump_json()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert [psutil.Process(pid).ppid() for pid in pids] == [rank.pid] * 2
        rank.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive
    assert not set(Path("/dev/shm").iterdir()) - before


def test_a_worker_imports_no_framework_and_no_mpi():
    look = (
        "import sys, hpctrain.data.worker; print(*{'torch','tensorflow','keras','mpi4py','horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


def test_memory_that_is_not_there_is_a_clear_error(folder):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(folder, "train", recipe(1)) as source:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(HpctrainError, match=r"MB of shared memory for the images"):
                next(source.stream([np.arange(4)], 0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_sources_of_a_recipe(folder):
    train, test = open_sources(recipe(0, path=str(folder)))
    assert (len(train), len(test)) == (29, 5)
    (piece,) = test.stream([np.arange(5)], 0)
    assert piece.images.shape == (5, 56, 56, 3)
    with pytest.raises(HpctrainError, match=r"needs data\.path") as error:
        open_sources(recipe(0))
    assert "--set data.path=DIR" in error.value.hint
