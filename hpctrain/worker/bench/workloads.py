"""The networks whose steps are timed, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.common.recipes.gpt import BENCHED
from hpctrain.worker.bench.in_turn import Call
from hpctrain.worker.models.torch_digits import digits_cnn
from hpctrain.worker.models.torch_gpt import GPT
from hpctrain.worker.models.torch_resnet import resnet50
from hpctrain.worker.models.torch_transformer import small_encoder

_IMAGE, _TOKENS, _LENGTH = 32, 8192, 64


@dataclass(frozen=True, kw_only=True)
class BenchWorkload:
    """A network with new weights, equal at every call of ``build``, and one batch of samples and labels."""

    build: Callable[[], nn.Module]
    x: torch.Tensor
    y: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        """The mean cross entropy of the batch."""
        return mean_loss(model(self.x), self.y)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
        """A training step: backward pass of the loss, and update."""

        def step() -> None:
            # Without arguments: Horovod's optimizer knows none of PyTorch's newer ones.
            optimizer.zero_grad()
            self.loss(model).backward()
            optimizer.step()

        return step


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy over all labels."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def convnet() -> nn.Module:
    """13 million parameters in the proportions of an image classifier: few in convolutions, many in dense layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 768), nn.Linear(768, 10)
    )


def workload(model: str, *, batch: int, image_size: int, rank: int) -> BenchWorkload:
    """The network of ``hpctrain bench step --model``; the samples differ between ranks.

    Args:
        batch: the number of images, or of rows of 64 tokens.
        image_size: the side of ResNet-50's images in pixels.
    """
    random = torch.Generator().manual_seed(rank)
    if model in ("transformer", "gpt"):
        tokens, build = (_TOKENS, small_encoder) if model == "transformer" else (BENCHED.vocabulary, _gpt)
        x, y = (torch.randint(0, tokens, (batch, _LENGTH), generator=random) for _ in range(2))
        return BenchWorkload(build=_seeded(build), x=x, y=y)
    if model == "digits":
        x = torch.rand(batch, 1, 8, 8, generator=random)
        return BenchWorkload(build=_seeded(digits_cnn), x=x, y=torch.randint(0, 10, (batch,), generator=random))
    build, size, classes = (convnet, _IMAGE, 10) if model == "convnet" else (resnet50, image_size, 1000)
    # Channels innermost, as in recipes: on a GPU a step takes almost twice as long with them outermost.
    x = torch.rand(batch, size, size, 3, generator=random).movedim(-1, 1)
    return BenchWorkload(build=_seeded(build), x=x, y=torch.randint(0, classes, (batch,), generator=random))


def _gpt() -> nn.Module:
    return GPT(BENCHED)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return seeded
