"""The small transformer encoder."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpctrain.worker.models.torch_transformer import Encoder, small_encoder


def test_size_is_as_stated():
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in small_encoder().parameters()) == 10_268_928


def test_every_position_sees_all_others():
    torch.manual_seed(0)
    model = Encoder(tokens=11, length=6, width=8, layers=2, heads=2)
    x = torch.randint(0, 10, (1, 5))
    changed = x.clone()
    changed[0, 4] = 10
    logits = model(x)
    assert logits.shape == (1, 5, 11)
    assert (logits != model(changed)).any(dim=2).all()


def test_equal_tokens_differ_by_their_positions_and_all_weights_learn():
    torch.manual_seed(0)
    model = Encoder(tokens=11, length=6, width=8, layers=2, heads=2)
    logits = model(torch.zeros(2, 6, dtype=torch.int64))
    assert not torch.equal(logits[0, 0], logits[0, 1])
    nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 11, (12,))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
