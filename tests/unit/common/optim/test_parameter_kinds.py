"""What parameters are to their layers, in networks that make it hard to tell."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hpctrain.worker.models.torch_resnet import resnet50  # noqa: E402
from hpctrain.worker.models.torch_transformer import Encoder  # noqa: E402
from hpctrain.worker.train import torch_rules  # noqa: E402


def test_resnet50_has_two_parameters_a_batch_norm_and_one_bias():
    with torch.device("meta"):
        model = resnet50()
    kinds = torch_rules.parameter_kinds(model)
    assert Counter(kinds.values()) == {"norm": 2 * 49, "shortcut_norm": 2 * 4, "weight": 54, "bias": 1}
    assert list(kinds) == [name for name, _ in model.named_parameters()]
    assert kinds["fc.bias"] == "bias"


def test_a_transformer():
    model = Encoder(tokens=7, length=5, width=8, layers=2, heads=2)
    kinds = torch_rules.parameter_kinds(model)
    norms = {name for name in kinds if "norm" in name}
    biases = {name for name in kinds if "bias" in name} - norms
    assert len(norms) == 10
    assert len(biases) == 8
    assert {name for name, kind in kinds.items() if kind == "norm"} == norms
    assert {name for name, kind in kinds.items() if kind == "bias"} == biases


class Odd(nn.Module):
    """Norms of every sort, a recurrent layer, a scalar and a vector of its own, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()

        class Own(nn.BatchNorm2d):
            pass

        self.scale = nn.Parameter(torch.ones(()))
        self.vector = nn.Parameter(torch.ones(3))
        self.norms = nn.ModuleList(
            [
                Own(3),
                nn.BatchNorm3d(3),
                nn.SyncBatchNorm(3),
                nn.InstanceNorm1d(3, affine=True),
                nn.GroupNorm(1, 3),
                nn.LayerNorm(3),
                nn.RMSNorm(3),
                nn.LocalResponseNorm(3),
            ]
        )
        self.recurrent = nn.LSTM(3, 3, bidirectional=True)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def test_other_layers_of_pytorch():
    model = Odd()
    kinds = torch_rules.parameter_kinds(model)
    assert list(kinds) == [name for name, _ in model.named_parameters()]
    assert Counter(kind for name, kind in kinds.items() if name.startswith("norms")) == {"norm": 6 * 2 + 1}
    recurrent = [kind for name, kind in kinds.items() if name.startswith("recurrent")]
    assert Counter(recurrent) == {"weight": 4, "bias": 4}
    assert Counter(kind for name, kind in kinds.items() if name.startswith("attention")) == {"weight": 2, "bias": 4}
    assert [kinds[name] for name in ("scale", "vector", "embedding.weight")] == ["weight"] * 3


def test_groups_have_the_decay_of_their_kind():
    from hpctrain.common.recipes.optimizers import Optimizer

    values = Optimizer(name="sgd", learning_rate=0.1, weight_decay=0.01, undecayed=("norm", "bias"))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    groups = torch_rules.make_optimizer(values, model).param_groups
    decays = {each: group["weight_decay"] for group in groups for each in group["params"]}
    names = {name: decays.pop(each) for name, each in model.named_parameters()}
    assert names == {"0.weight": 0.01, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0} and not decays
