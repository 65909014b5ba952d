"""Finds out whether the ranks of a script each train alone because a call was forgotten."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hpctrain.common.settings import RANKS_ALONE
from hpctrain.worker.comm import own_processes
from hpctrain.worker.comm.after_import import change_after_import
from hpctrain.worker.comm.first_updates import FirstUpdates

# A script that imports one of these knows of the other ranks without hpctrain.
_OTHERS = ["mpi4py.MPI", "horovod.torch", "horovod.tensorflow", "horovod.keras", "deepspeed"]

_KERAS_OPTIMIZERS = "keras.src.optimizers.base_optimizer"
_GROUPS = "torch.distributed.distributed_c10d"
# PyTorch's processes meet in one of these: by the place of the argument that says how many they are.
_STORES = {"TCPStore": 2, "FileStore": 1}
# The update at whose end a script whose ranks train alone is told so.
_TOLD_AT_UPDATE = 2
_updates = 0
# The most processes that a store of this one is for; and the number where a store does not say it.
_met, _UNKNOWN = 1, 2**62
_watching = False
# What is called when the script has trained for a moment.
_mention: Callable[[], object]


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


def watch(mention: Callable[[], object]) -> None:
    """Watch from now on whether the script trains, and whether it meets other processes by PyTorch.

    Args:
        mention: is called once, when the script has trained for a moment; in place of that of an earlier call.
    """
    global _watching, _mention
    _mention = mention
    if _watching:
        return
    _watching = True

    def updated() -> None:
        global _updates
        _updates += 1
        if _updates == _TOLD_AT_UPDATE:
            _mention()

    FirstUpdates(updated, wanted=_TOLD_AT_UPDATE)
    change_after_import(
        {
            _KERAS_OPTIMIZERS: functools.partial(_watch_keras, updated),
            _GROUPS: _watch_stores,
        }
    )


def _watch_keras(updated: Callable[[], object], module: ModuleType) -> None:
    apply = module.BaseOptimizer.apply

    @functools.wraps(apply)
    def watched(*arguments: Any, **settings: Any) -> Any:
        updated()
        return apply(*arguments, **settings)

    module.BaseOptimizer.apply = watched


def _watch_stores(module: ModuleType) -> None:
    for name, place in _STORES.items():
        # A build of PyTorch without torch.distributed has none.
        if kind := getattr(getattr(module.torch._C, "_distributed_c10d", None), name, None):
            kind.__init__ = _noting_others(kind.__init__, place)


def _noting_others(make: Callable[..., None], place: int) -> Callable[..., None]:
    @functools.wraps(make)
    def noted(self: object, *arguments: Any, **settings: Any) -> None:
        global _met
        make(self, *arguments, **settings)
        processes = arguments[place] if len(arguments) > place else settings.get("world_size")
        _met = max(_met, processes if processes and processes > 0 else _UNKNOWN)

    return noted


def processes_met() -> int:
    """How many processes this one trains with, as far as PyTorch's stores say; 1 without one."""
    return _met


def forgotten_calls(ranks: int, *, joined: bool, distributed: bool, others: bool = False) -> Forgotten | None:
    """What a script of several ranks has forgotten so far; None if nothing.

    Args:
        joined: whether the script called ``ht.init``.
        distributed: what :meth:`Communicator.trains_together` said.
        others: what :func:`others_imported` said before ``ht.init``, which imports some of them.
    """
    if ranks == 1 or distributed or RANKS_ALONE.read():
        return None
    trained = _updates > 0 or own_processes.trained_apart()
    if joined:
        if not trained:
            return None
        text = (
            f"{ranks} ranks train, each by itself: what they train was never passed to ht.distribute. The results are "
            "rank 0's alone; model, optimizer = ht.distribute(model, optimizer) trains one model on all. Updates "
            "without an optimizer need one, or gradients that comm.allreduce has averaged"
        )
        return Forgotten(text, alone=not others)
    if _has_group() or _met > 1 or others_imported() or _has_tensorflow_workers():
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
    """Whether torch.distributed has a default group of several processes."""
    groups = sys.modules.get("torch.distributed")
    return bool(groups and groups.is_available() and groups.is_initialized() and groups.get_world_size() > 1)


def _has_tensorflow_workers() -> bool:
    """Whether a strategy of tf.distribute has connected this process to others."""
    eager = sys.modules.get("tensorflow.python.eager.context")
    context = eager and eager.context_safe()
    server: Any = context and context._collective_ops_server_def
    return bool(server) and sum(len(job.tasks) for job in server.cluster.job) > 1
