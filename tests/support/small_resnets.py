"""A recipe's resnet18 as a network of two blocks instead of eight: every kind of its layers, a tenth of its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def small_resnets() -> Iterator[None]:
    """In both frameworks, as far as they are installed, until the end of the context."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ModuleNotFoundError):
            from hpctrain.worker.models import torch_resnet

            patch.setattr(torch_resnet, "resnet18", _torch)
        with contextlib.suppress(ModuleNotFoundError):
            from hpctrain.worker.models import keras_resnet

            patch.setattr(keras_resnet, "resnet18", _keras)
        yield


def _torch(classes: int, *, zero_gamma: bool, weights: Any, norm: Any) -> Any:
    from hpctrain.worker.models.torch_resnet import Basic, ResNet

    return ResNet(Basic, (1, 1), classes=classes, zero_gamma=zero_gamma, weights=weights, norm=norm)


def _keras(classes: int, *, zero_gamma: bool, weights: Any, norm: Any) -> Any:
    from hpctrain.worker.models.keras_resnet import _basic, _Layers, _resnet

    return _resnet(_basic, (1, 1), _Layers(norm=norm, weights=weights, zero_gamma=zero_gamma), classes)
