"""Begins a network in PyTorch with given weights, and trains parts of it not at all or at another rate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.sections import ModelSettings
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.models.pretrained import begin_with

_NAMED = 8


@torch.no_grad()
def load_weights(model: nn.Module, settings: ModelSettings, comm: Communicator) -> Collection[str]:
    """Replace a network's values by those of ``model.init_from``, and say which of them are new.

    Returns the names of the values that are new.

    Raises:
        HpctrainError: see :func:`hpctrain.worker.models.pretrained.begin_with`.
    """
    # Without duplicates: a parameter that two layers share is saved once.
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    arrays, words = begin_with(settings, {name: tuple(value.shape) for name, value in values.items()})
    for name, array in arrays.items():
        values[name].copy_(torch.from_numpy(array))
    comm.say(f"{settings.name} {words}")
    return values.keys() - arrays.keys()


def freeze(model: nn.Module, patterns: Sequence[str], drawn: Collection[str] = ()) -> list[nn.Module]:
    """Let the parameters that a pattern matches keep their values.

    Returns the normalisations all of whose parameters do: they are to stay in evaluation mode, in which they use their
    running statistics and leave them as they are.

    Args:
        drawn: names of values that were drawn although the network begins with given weights.

    Raises:
        HpctrainError: a pattern matches nothing, or a parameter that was drawn, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    found = _matched(parameters, patterns, "model.frozen")
    for name, pattern in found.items():
        if name in drawn:
            raise HpctrainError(
                "HT-tuning-pattern-not-valid",
                "model.frozen: {pattern!r} matches {name}, which is drawn anew and would stay at random values",
                "leave the last layer out of model.frozen, or --set model.new_head=false for that of the given weights",
                pattern=pattern,
                name=name,
            )
    for name in found:
        parameters[name].requires_grad_(False)
    if len(found) == len(parameters):
        raise HpctrainError(
            "HT-tuning-pattern-not-valid",
            "model.frozen: the patterns match every parameter, so that nothing is trained",
        )
    return [module for module in model.modules() if _is_still(module)]


def _is_still(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return norm and bool(own) and not any(parameter.requires_grad for parameter in own)


def rate_factors(model: nn.Module, rates: Mapping[str, float]) -> dict[str, float]:
    """The factor of each trained parameter's rate; of several patterns the first that matches it counts.

    Raises:
        HpctrainError: a pattern matches no trained parameter that those before it leave.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = _matched(trained, list(rates), "optimizer.rates")
    return {name: rates[found[name]] if name in found else 1.0 for name in trained}


def _matched(names: Sequence[str] | Mapping[str, object], patterns: Sequence[str], key: str) -> dict[str, str]:
    """The first pattern that matches each name, or a module that it is in; other names are left out.

    Raises:
        HpctrainError: a pattern matches nothing that those before it leave.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        own = [
            name for name in names if name not in found and any(fnmatchcase(part, pattern) for part in _prefixes(name))
        ]
        if not own:
            modules = dict.fromkeys(name.partition(".")[0] for name in names)
            raise HpctrainError(
                "HT-tuning-pattern-not-valid",
                "{key}: {pattern!r} matches no parameter that is trained and that no pattern before it matches",
                f"names begin with {', '.join([*modules][:_NAMED])}; layer1.* is all of layer1, and so is layer1",
                key=key,
                pattern=pattern,
            )
        found |= dict.fromkeys(own, pattern)
    return found


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))
