"""The networks that recipes name, one definition per framework."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hpctrain.common.recipes.families import IMAGENET_CLASSES, Framework
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.models.batch_norm import extent


def build(model: ModelSettings, framework: Framework, comm: Communicator | None = None, *, at_once: int = 1) -> Any:
    """A new network with freshly drawn weights: a ``torch.nn.Module`` or a ``keras.Model``.

    Collective over all ranks if they share batch statistics.

    Args:
        framework: ``torch`` takes images (N, C, H, W), ``keras`` (N, H, W, C); a GPT tokens (N, T).
        comm: the ranks, for batch statistics over several; None for one process.
        at_once: the most images that a rank computes at once, see :meth:`hpctrain.common.recipes.schema.Batch.at_once`.
            Needed where ``model.batch_norm.span`` is a number.

    Raises:
        HpctrainError: a span of batch statistics that does not fit the ranks.
    """
    family, settings = model.family, model.batch_norm
    module = importlib.import_module(f"hpctrain.worker.models.{framework}_{family.module}")
    if family.predicts_tokens:
        return module.GPT(model)
    make = getattr(module, model.name)
    if not family.normalises:
        return make()
    layers = importlib.import_module(f"hpctrain.worker.models.{framework}_batch_norm")
    norm = functools.partial(
        getattr(layers, f"{framework.capitalize()}BatchNorm"),
        extent=extent(settings, comm, at_once=at_once),
        momentum=0.0 if settings.statistics == "last_batch" else settings.momentum,
        epsilon=settings.epsilon,
    )
    return make(model.classes or IMAGENET_CLASSES, zero_gamma=model.zero_gamma, weights=model.weights, norm=norm)
