"""Finds out at the end of a script whether its ranks each trained alone because a call was forgotten."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

# A script that imports one of these knows of the other ranks without hpctrain.
_OTHERS = ("mpi4py.MPI", "horovod.torch", "horovod.tensorflow", "horovod.keras", "deepspeed")

# A script that imports one of these may have built on torch.distributed's default group, if there is one.
_ON_GROUPS = ("accelerate", "lightning_fabric", "lightning.fabric")


def forgotten_calls(ranks: int, *, joined: bool, distributed: bool) -> str | None:
    """The message for the user at the end of a script of several ranks; None if nothing was forgotten.

    ``joined`` and ``distributed`` tell whether the script called ``ht.init`` and ``ht.distribute``.
    """
    if ranks == 1 or distributed:
        return None
    if joined:
        if _may_use_groups():
            return None
        return (
            f"{ranks} ranks trained, each by itself: the script made an optimizer, but never passed it to "
            "ht.distribute. Its results are rank 0's alone; model, optimizer = ht.distribute(model, optimizer) trains "
            "one model on all"
            if _trained()
            else None
        )
    if any(name in sys.modules for name in _OTHERS):
        return None
    return (
        f"the script never called ht.init(): unless it joins the other ranks in another way, it ran {ranks} times, "
        "each rank by itself. help(hpctrain) shows the lines that make it one training run"
    )


def _may_use_groups() -> bool:
    groups = sys.modules.get("torch.distributed")
    return groups is not None and groups.is_initialized() and any(name in sys.modules for name in _ON_GROUPS)


def _trained() -> bool:
    """Whether an optimizer of PyTorch was made, or one of Keras that is still there has updated something."""
    optim = sys.modules.get("torch.optim.optimizer")
    if optim is not None and any(_is_used(kind) for kind in _subclasses(optim.Optimizer)):
        return True
    keras = sys.modules.get("keras.src.optimizers.base_optimizer")
    if keras is None:
        return False
    # Not isinstance(), which reads __class__ of the object: a weakref.proxy whose object is gone raises there.
    made = (each for each in gc.get_objects() if issubclass(type(each), keras.BaseOptimizer))
    return any(int(each.iterations) > 0 for each in made)


def _is_used(kind: Any) -> bool:
    """Whether an optimizer of this class was made: PyTorch then wraps the class's ``step`` for its profiler."""
    return getattr(vars(kind).get("step"), "hooked", False)


def _subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
