"""Finds out whether the ranks of a script each train alone because a call was forgotten."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

# A script that imports one of these knows of the other ranks without hpctrain.
_OTHERS = ["mpi4py.MPI", "horovod.torch", "horovod.tensorflow", "horovod.keras", "deepspeed"]

# A script that imports one of these may have built on torch.distributed's default group, if there is one.
_ON_GROUPS = ("accelerate", "lightning_fabric", "lightning.fabric")


@dataclass(frozen=True)
class Forgotten:
    """What the user is told about ranks that did not become one training run.

    Attributes:
        alone: whether it is certain that every rank trained a model of its own, so that the run must not count as done.
    """

    text: str
    alone: bool


def others_imported() -> bool:
    """Whether the script has imported a library by which ranks can train together without hpctrain."""
    return any(name in sys.modules for name in _OTHERS)


def ignore_import(name: str) -> None:
    """Count a module that hpctrain itself imports ahead of the script as no sign that the script knows other ranks."""
    if name in _OTHERS:
        _OTHERS.remove(name)


def forgotten_calls(ranks: int, *, joined: bool, distributed: bool, others: bool = False) -> Forgotten | None:
    """What a script of several ranks has forgotten so far; None if nothing.

    Args:
        joined: whether the script called ``ht.init``.
        distributed: whether it called ``ht.distribute``, asked for the run's process groups, or reduced arrays itself.
        others: what :func:`others_imported` said before ``ht.init``, which imports some of them.
    """
    if ranks == 1 or distributed:
        return None
    trained, group = _trained(), _has_group()
    if joined:
        if not trained or (group and any(name in sys.modules for name in _ON_GROUPS)):
            return None
        text = (
            f"{ranks} ranks train, each by itself: the script made an optimizer, but never passed it to ht.distribute. "
            "Its results are rank 0's alone; model, optimizer = ht.distribute(model, optimizer) trains one model on all"
        )
        # Over Gloo and NCCL ht.init() makes the group on which DDP or FSDP may have built.
        return Forgotten(text, alone=not (group or others))
    if group or others_imported() or _has_tensorflow_workers():
        return None
    unnamed = "tensorflow" in sys.modules and "TF_CONFIG" not in os.environ
    strategy = " Strategies of tf.distribute need --backend multi_worker." if unnamed else ""
    text = (
        f"the script never called ht.init(), nor torch.distributed's init_process_group(): unless it joins the other "
        f"ranks in another way, it runs {ranks} times, each rank by itself. help(hpctrain) shows the lines that make "
        f"it one training run.{strategy}"
    )
    return Forgotten(text, alone=trained)


def _has_group() -> bool:
    """Whether torch.distributed has a default group."""
    groups = sys.modules.get("torch.distributed")
    return groups is not None and bool(groups.is_available() and groups.is_initialized())


def _has_tensorflow_workers() -> bool:
    """Whether a strategy of tf.distribute has connected this process to others."""
    eager = sys.modules.get("tensorflow.python.eager.context")
    context = eager and eager.context_safe()
    server: Any = context and context._collective_ops_server_def
    return bool(server) and sum(len(job.tasks) for job in server.cluster.job) > 1


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
    # In the scope of a strategy the count is a variable of each replica, of which int() knows nothing.
    return any(int(numpy.asarray(each.iterations)) > 0 for each in made)


def _is_used(kind: Any) -> bool:
    """Whether an optimizer of this class was made: PyTorch then wraps the class's ``step`` for its profiler."""
    return getattr(vars(kind).get("step"), "hooked", False)


def _subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
