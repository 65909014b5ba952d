"""Makes an optimizer of plain parameters one of their DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.moved import divided
from hpctrain.worker.adapters.torch.parallel.trial import New, try_rule
from hpctrain.worker.adapters.torch.references import Optimizer, optimizers_in, parameters_of, replace

# Their fused kernels take DTensors (torch/distributed/tensor/_ops/_pointwise_ops.py of PyTorch 2.13); SGD's does not.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
# Update each element by itself, in operations that DTensors have. The tests show that, so these need no trial.
_ELEMENT_WISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop),
)


class Rewiring:
    """Which parameters of a model its optimizers update, by name. Create it before the parameters are replaced.

    Args:
        alone: whether other ranks get other parameters, as in a pipeline.

    Raises:
        HpctrainError: an optimizer has parameters that the model does not have.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, alone: bool = False) -> None:
        self._optimizers, self._alone = optimizers, alone
        self._old = dict(model.named_parameters(remove_duplicate=False))
        known = {id(each) for each in self._old.values()}
        for optimizer in optimizers:
            _check(optimizer, known)

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Give each optimizer the parameters that now have its parameters' names, except names that no model has.

        Raises:
            HpctrainError: an optimizer would compute other numbers with them.
        """
        new = {name: each for model in models for name, each in model.named_parameters(remove_duplicate=False)}
        now: dict[int, dict[int, nn.Parameter]] = {}
        for name, old in self._old.items():
            own = now.setdefault(id(old), {})
            if name in new:
                own.setdefault(id(new[name]), new[name])
        for optimizer in self._optimizers:
            rewire(optimizer, {old: list(each.values()) for old, each in now.items()}, alone=self._alone)
        self._old.clear()


def rewire(optimizer: Optimizer, now: New, *, alone: bool = False) -> None:
    """Replace an optimizer's parameters in place, and divide its state for them.

    Args:
        now: the replacements by the ``id`` of each old parameter.
        alone: whether other ranks get other parameters, as in a pipeline.

    Raises:
        HpctrainError: the optimizer would compute other numbers with them.
    """
    every = optimizers_in(optimizer)
    prepare: Callable[[Optimizer], None] = fuse
    if not all(map(_is_known, every)):
        prepare = _tried(optimizer, now, alone)
    replace(optimizer, lambda each: now.get(id(each)), divided)
    for each in every:
        prepare(each)


def _tried(optimizer: Optimizer, now: New, alone: bool) -> Callable[[Optimizer], None]:
    """The preparation with which the optimizer computes the same numbers, found by trial."""
    try:
        try_rule(optimizer, now, prepare=fuse, alone=alone)
        return fuse
    except HpctrainError:
        # DTensors lack some operations on several parameters at once: try a loop.
        groups = [group for each in optimizers_in(optimizer) for group in each.param_groups]
        if all(group.get("foreach", True) is not None for group in groups):
            raise
        try_rule(optimizer, now, prepare=_loop, alone=alone)
        return _loop


def _is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is exact with DTensors, with the kernels that the script chose."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer) in (_FUSED if fused else _ELEMENT_WISE)


def _loop(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None:
            group["foreach"] = False


def _check(optimizer: Optimizer, known: set[int]) -> None:
    foreign = next((each for each in parameters_of(optimizer) if id(each) not in known), None)
    if foreign is not None:
        raise HpctrainError(
            "HT-optimizer-foreign-parameter",
            "{optimizer} updates a parameter of shape {shape} that the model does not have",
            "make the optimizer from model.parameters(), after the model's last layer was added or replaced",
            optimizer=type(optimizer).__name__,
            shape=tuple(foreign.shape),
        )


def fuse(optimizer: Optimizer) -> None:
    """Let an optimizer of DTensors update all of them in one kernel, since a loop spends its time on dispatch.

    The script's own choice stays, and so do the settings of another package's optimizer.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        divided = [each for each in group["params"] if isinstance(each, DTensor)]
        chosen = [group.get(key) for key in ("foreach", "fused")] + [
            group.get(key) or None for key in ("capturable", "differentiable")
        ]
        if not divided or any(each is not None for each in chosen):
            continue
        if not all(each.is_floating_point() for each in group["params"]):
            continue
        if type(optimizer) in _FUSED and not optimizer.state:
            group["fused"], group["foreach"] = True, False
        elif "foreach" in group:
            group["foreach"] = True
