"""Stochastic depth: against blocks put together by hand, and drawn alike on any ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.models import build
from hpctrain.worker.train.feed import Feed
from support.one_rank import OneRank

torch = pytest.importorskip("torch")

from hpctrain.worker.models.torch_resnet import Basic, StochasticDepth  # noqa: E402

RATE = 0.6


def by_hand(model, images, draws):
    """The forward pass of resnet18, what each block adds multiplied by 0 or by 1 over the probability to keep it."""
    x = model.maxpool(torch.relu(model.bn1(model.conv1(images))))
    blocks = [module for module in model.modules() if isinstance(module, Basic)]
    for number, block in enumerate(blocks):
        y = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
        rate = RATE * number / (len(blocks) - 1)
        kept = torch.tensor([0.0 if draw < rate else 1 / (1 - rate) for draw in draws[:, number]])
        x = torch.relu(y * kept[:, None, None, None] + block.downsample(x))
    return model.fc(x.mean(dim=(2, 3)))


@pytest.mark.slow
def test_blocks_are_left_out_sample_by_sample_in_training_alone():
    plain, model = (build(ModelSettings(name="resnet18", zero_gamma=False), "torch") for _ in range(2))
    model.load_state_dict(plain.state_dict())
    depth = StochasticDepth(model, RATE)
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    draws = torch.rand(6, 8, generator=torch.Generator().manual_seed(2))
    depth.draw(draws)
    found = model(images)
    assert torch.allclose(found, by_hand(plain, images, draws), rtol=1e-4, atol=1e-5)
    found.sum().backward()
    plain.load_state_dict(model.state_dict())
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))


def recipe(**values: object) -> Recipe:
    base = {
        "name": "test",
        "source": "none",
        "reported": [{"metric": "test_accuracy", "value": 1.0}],
        "model": {"name": "resnet18"},
        "data": {"name": "imagenet"},
        "batch": {"size": 23, "micro_batch": 3},
        "optimizer": {"name": "sgd", "learning_rate": 0.01},
        "stochastic_depth": 0.1,
        "epochs": 1,
    }
    return Recipe.model_validate_json(json.dumps({**base, **values}))


@pytest.mark.parametrize("mixing", [None, {"mixup": 0.2, "group": 5}])
@pytest.mark.parametrize("length", [23, 4])
def test_draws_are_the_same_on_any_ranks(mixing, length):
    plan, batch = recipe(mixing=mixing), np.arange(length)

    def drawn(ranks: int, epoch: int, first: int) -> np.ndarray:
        found = []
        for rank in range(ranks):
            feed = Feed(plan, OneRank(rank, ranks), 100)
            own, mine = feed.share(batch).count, []
            for part in feed.parts(batch):
                count = len(part.positions)
                images, labels = np.zeros((count, 4, 4, 3), np.uint8), np.zeros(count, np.int64)
                samples = feed.completed(Samples(images=images, labels=labels), part, epoch, first)
                assert samples.depths.shape == (len(samples), 8)
                mine.append(samples.depths)
            found.append(np.concatenate(mine)[:own])
        return np.concatenate(found)

    one = drawn(1, 2, 46)
    assert len(one) == length and len(np.unique(one)) == one.size
    for ranks in (2, 3, 7):
        np.testing.assert_array_equal(drawn(ranks, 2, 46), one)
    assert not np.array_equal(drawn(1, 2, 69), one) and not np.array_equal(drawn(1, 3, 46), one)
