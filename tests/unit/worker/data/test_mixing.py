"""Mixup and CutMix: against the sources' own steps, and the same whatever ranks and micro-batches there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hpctrain.common.recipes.augmentation import Mixing
from hpctrain.worker.data.mixing import Mixer, cutmix_box, piece
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.feed import Feed
from support.digits_recipes import digits_recipe
from support.one_rank import OneRank

torch = pytest.importorskip("torch")

from hpctrain.worker.train.torch_forward import mixed  # noqa: E402

EVERYTHING = Mixing(mixup=0.2, cutmix=1.0)


def whole(length: int, group: int | None):
    return piece(np.arange(length), length, group)


def applied(images: np.ndarray, mixture) -> np.ndarray:
    """NumPy, image by image."""
    result = []
    for i, partner in enumerate(mixture.partners):
        image = mixture.own[i] * images[i] + mixture.other[i] * images[partner]
        top, bottom, left, right = mixture.boxes[i]
        image[top:bottom, left:right] = images[partner][top:bottom, left:right]
        result.append(image)
    return np.stack(result)


def torchvisions_mixup(batch, target, lam: float):
    """As references/classification/transforms.py goes about it: in place, on float32."""
    rolled, target_rolled = batch.roll(1, 0), target.roll(1, 0)
    batch = batch.clone().mul_(lam).add_(rolled.mul_(1.0 - lam))
    return batch, target.clone().mul_(lam).add_(target_rolled.mul_(1.0 - lam))


def torchvisions_cutmix(batch, target, box: tuple[int, int, int, int]):
    top, bottom, left, right = box
    rolled, target_rolled = batch.roll(1, 0), target.roll(1, 0)
    batch = batch.clone()
    batch[:, :, top:bottom, left:right] = rolled[:, :, top:bottom, left:right]
    lam = float(1.0 - (right - left) * (bottom - top) / (batch.shape[2] * batch.shape[3]))
    return batch, target.clone().mul_(lam).add_(target_rolled.mul_(1.0 - lam))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_images_have_the_bits_of_torchvisions_own_steps(kind):
    alpha = {"mixup": {"mixup": 0.2}, "cutmix": {"cutmix": 1.0}}[kind]
    mixer = Mixer(Mixing(**alpha), seed=3)
    random = np.random.default_rng(0)
    for first in range(0, 600, 12):
        images = torch.from_numpy(random.normal(size=(12, 3, 10, 14)).astype(np.float32))
        targets = torch.eye(12)
        mixture = mixer.mixture(whole(12, None), 0, first, 10, 14)
        found = mixed(images, mixture)
        counter = np.array([0, 0, first, 2**64 - 1], np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=np.array([3, 0], np.uint64), counter=counter))
        drawn.integers(1)
        lam = float(drawn.beta(*2 * [next(iter(alpha.values()))]))
        if kind == "mixup":
            expected, soft = torchvisions_mixup(images, targets, lam)
        else:
            box = cutmix_box(lam, 10, 14, int(drawn.integers(10)), int(drawn.integers(14)))
            expected, soft = torchvisions_cutmix(images, targets, box)
        assert torch.equal(found, expected)
        np.testing.assert_allclose(mixture.label, soft.diagonal(), atol=1e-7)


@given(lam=st.floats(0, 1), height=st.integers(1, 300), width=st.integers(1, 300), data=st.data())
def test_a_box_is_that_of_torchvision_and_of_timm(lam, height, width, data):
    y, x = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    top, bottom, left, right = cutmix_box(lam, height, width, y, x)
    # torchvision: half sides first
    r = 0.5 * math.sqrt(1.0 - lam)
    assert (top, bottom) == (max(y - int(r * height), 0), min(y + int(r * height), height))
    assert (left, right) == (max(x - int(r * width), 0), min(x + int(r * width), width))
    # timm: sides first
    tall, wide = int(height * np.sqrt(1 - lam)), int(width * np.sqrt(1 - lam))
    assert (bottom, right) == (np.clip(y + tall // 2, 0, height), np.clip(x + wide // 2, 0, width))


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 40),
    group=st.none() | st.integers(1, 20),
    ranks=st.integers(1, 5),
    micro_batch=st.none() | st.integers(1, 7),
    first=st.integers(0, 10**6),
)
def test_every_rank_mixes_as_one_process_does(length, group, ranks, micro_batch, first):
    values = {"mixup": 0.2, "cutmix": 1.0, "group": group}
    batch = {"size": length, "micro_batch": micro_batch}
    plan = digits_recipe(mixing=values, batch=batch)
    images = np.random.default_rng(1).random((length, 6, 5, 1), np.float32)
    samples = np.arange(1000, 1000 + length)
    expected = applied(images, Mixer(plan.mixing, plan.seed).mixture(whole(length, group), 2, first, 6, 5))
    seen = []
    for rank in range(ranks):
        feed = Feed(plan, OneRank(rank, ranks), length)
        own = feed.share(samples).count
        loaded = feed.pieces([samples])
        for part in feed.parts(samples):
            pixels = images[next(loaded) - 1000]
            piece = feed.completed(Samples(images=pixels, labels=np.zeros(len(pixels), np.int64)), part, 2, first)
            found = mixed(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), piece.mixture).numpy()
            assert len(piece) == len(found) == len(part.partners)
            if own > 0:
                seen.append(found.transpose(0, 2, 3, 1))
            own -= len(piece)
        assert not list(loaded)
    np.testing.assert_array_equal(np.concatenate(seen), expected)


def test_no_rank_loads_more_than_one_image_beside_its_own():
    recipe, grouped = (
        digits_recipe(batch={"size": 64}, mixing={"mixup": 1.0, **group}) for group in ({}, {"group": 8})
    )
    batch = np.arange(64)
    for ranks in (1, 2, 3, 8):
        feeds = [Feed(recipe, OneRank(rank, ranks), 64) for rank in range(ranks)]
        loaded = [len(part.positions) for feed in feeds for part in feed.parts(batch)]
        assert sum(loaded) == 64 + (ranks if ranks > 1 else 0)
    aligned = Feed(grouped, OneRank(3, 8), 64)
    assert [len(part.positions) for part in aligned.parts(batch)] == [8]


def test_what_is_drawn_is_distributed_as_in_the_sources():
    mixer = Mixer(EVERYTHING, seed=0)
    group = whole(1, None)
    drawn = [mixer.mixture(group, epoch, place, 100, 100) for epoch in range(4) for place in range(1000)]
    cutmix = np.array([bool(each.boxes.any() or (each.own[0] == 1 and each.label[0] == 1)) for each in drawn])
    assert stats.binomtest(int(cutmix.sum()), len(cutmix)).pvalue > 1e-3
    mixup = np.array([each.label[0] for each in drawn])[~cutmix]
    assert stats.kstest(mixup, stats.beta(0.2, 0.2).cdf).pvalue > 1e-3
    # The middle of a box is uniform, and its area before it is cut off too, as of Beta(1, 1).
    inner = [
        each.boxes[0] for each in drawn if each.boxes.any() and each.boxes[0].min() > 0 and each.boxes[0].max() < 100
    ]
    assert inner
    sources = np.random.default_rng(5)
    reference = []
    for _ in range(4000):
        top, bottom, left, right = cutmix_box(sources.beta(1, 1), 100, 100, *sources.integers(100, size=2))
        reference.append(1 - (bottom - top) * (right - left) / 10000)
    found = np.array([each.label[0] for each in drawn])[cutmix]
    assert stats.ks_2samp(found, reference).pvalue > 1e-3


def test_draws_differ_from_group_to_group_epoch_to_epoch_and_seed_to_seed():
    places = [(seed, epoch, place) for seed in range(3) for epoch in range(3) for place in range(0, 512, 128)]
    found = {
        Mixer(EVERYTHING, seed).mixture(whole(1, None), epoch, place, 99, 99).label[0] for seed, epoch, place in places
    }
    assert len(found) == len(places)
