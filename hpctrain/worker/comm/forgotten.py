"""Finds out whether the ranks of a script each train alone because a call was forgotten."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# A script that imports one of these knows of the other ranks without hpctrain.
_OTHERS = ("mpi4py.MPI", "horovod.torch", "horovod.tensorflow", "horovod.keras", "deepspeed")

# A script that imports one of these may have built on torch.distributed's default group, if there is one.
_ON_GROUPS = ("accelerate", "lightning_fabric", "lightning.fabric")


@dataclass(frozen=True)
class Forgotten:
    """What the user is told about ranks that did not become one training run, and whether they did train."""

    text: str
    trained: bool


def forgotten_calls(ranks: int, *, joined: bool, distributed: bool) -> Forgotten | None:
    """What a script of several ranks has forgotten so far; None if nothing.

    ``joined`` tells whether the script called ``ht.init``; ``distributed`` whether it called ``ht.distribute``, asked
    for the run's process groups, or reduced arrays itself.
    """
    if ranks == 1 or distributed or _may_use_groups(joined):
        return None
    trained = _trained()
    if joined:
        text = (
            f"{ranks} ranks train, each by itself: the script made an optimizer, but never passed it to ht.distribute. "
            "Its results are rank 0's alone; model, optimizer = ht.distribute(model, optimizer) trains one model on all"
        )
        return Forgotten(text, trained) if trained else None
    if any(name in sys.modules for name in _OTHERS):
        return None
    text = (
        f"the script never called ht.init(), nor torch.distributed's init_process_group(): unless it joins the other "
        f"ranks in another way, it runs {ranks} times, each rank by itself. help(hpctrain) shows the lines that make "
        "it one training run"
    )
    return Forgotten(text, trained)


def _may_use_groups(joined: bool) -> bool:
    """Whether the script may have built on torch.distributed's default group, which ht.init() makes too."""
    groups = sys.modules.get("torch.distributed")
    made = groups is not None and groups.is_available() and groups.is_initialized()
    return made and (not joined or any(name in sys.modules for name in _ON_GROUPS))


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
