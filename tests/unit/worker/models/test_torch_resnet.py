"""Residual networks against the published sizes, and against the papers' own statements."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpctrain.worker.models.torch_resnet import Basic, Bottleneck, resnet18, resnet50, resnet101


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "parameters"), [(resnet18, 11_689_512), (resnet50, 25_557_032), (resnet101, 44_549_160)]
)
def test_parameters_are_as_many_as_published(build, parameters):
    with torch.device("meta"):
        assert count(build()) == parameters


@pytest.mark.slow
def test_shapes_of_the_stages_are_those_of_the_paper():
    # He et al. 2015, table 1, at 224 x 224
    model = resnet50().eval()
    seen: dict[str, tuple[int, ...]] = {}
    for stage in model.stages:
        model.get_submodule(stage).register_forward_hook(
            lambda module, given, made, stage=stage: seen.update({stage: tuple(made.shape[1:])})
        )
    with torch.no_grad():
        logits = model(torch.rand(1, 3, 224, 224))
    assert logits.shape == (1, 1000)
    assert list(seen.values()) == [(256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]


def test_the_stride_is_on_the_3x3_convolution():
    strided = [name for name, module in resnet50().named_modules() if getattr(module, "stride", 1) == (2, 2)]
    assert [name for name in strided if "layer" in name] == [
        f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("build", [resnet18, resnet50])
def test_every_block_starts_as_the_identity_if_asked(build):
    torch.manual_seed(0)
    x = torch.rand(2, 64, 8, 8)
    for zero_gamma in (True, False):
        model = build(classes=10, zero_gamma=zero_gamma)
        blocks = [module for module in model.modules() if isinstance(module, Basic | Bottleneck)]
        same = [torch.equal(block.eval()(x), block.downsample(x).relu()) for block in blocks[:1]]
        assert same == [zero_gamma]
        assert {bool(block.last.weight.any()) for block in blocks} == {not zero_gamma}


@pytest.mark.parametrize("images", [1, 2])
def test_small_images_train(images):
    """One of them leaves one value a channel after the last stage."""
    model = resnet18(classes=10)
    nn.functional.cross_entropy(model(torch.rand(images, 3, 32, 32)), torch.arange(images)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
