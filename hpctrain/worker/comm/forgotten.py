"""Finds out at the end of a script whether its ranks each trained alone because a call was forgotten."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from hpctrain.common.settings import RANKS_ALONE
from hpctrain.worker.comm.after_import import change_after_import

# A script that imports one of these knows of the other ranks without hpctrain.
_OTHERS = ["mpi4py.MPI", "horovod.torch", "horovod.tensorflow", "horovod.keras", "deepspeed"]


class _Signs:
    """What was seen of the script so far."""

    watching = trained = has_own_group = False


_signs = _Signs()


def others_imported() -> bool:
    """Whether the script has imported a library by which ranks can train together without hpctrain."""
    return any(name in sys.modules for name in _OTHERS)


def ignore_import(name: str) -> None:
    """Count a module that hpctrain itself imports ahead of the script as no sign that the script knows other ranks."""
    if name in _OTHERS:
        _OTHERS.remove(name)


def note_own_group() -> None:
    """Note that the script has made a process group of its own, which it may have destroyed at its end."""
    _signs.has_own_group = True


def watch() -> None:
    """Note from now on whether an optimizer of PyTorch or Keras makes a step. Idempotent."""
    if not _signs.watching:
        _signs.watching = True
        change_after_import(
            {
                "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(_note_step),
                "keras.src.optimizers.base_optimizer": _watch_keras,
            }
        )


def _watch_keras(module: ModuleType) -> None:
    apply = module.BaseOptimizer.apply

    @functools.wraps(apply)
    def watched(*arguments: Any, **settings: Any) -> Any:
        _note_step()
        return apply(*arguments, **settings)

    module.BaseOptimizer.apply = watched


def _note_step(*_: object) -> None:
    _signs.trained = True


def forgotten_calls(ranks: int, *, joined: bool, distributed: bool) -> str | None:
    """What a script has forgotten whose ranks each trained a model of their own; None where they did not.

    Args:
        joined: whether the script called ``ht.init``.
        distributed: whether it used the communicator, or imported another library that joins ranks.
    """
    if ranks == 1 or distributed or not _signs.trained or RANKS_ALONE.read():
        return None
    if joined:
        return (
            f"{ranks} ranks train, each by itself: what they train was never passed to ht.distribute. The results are "
            "rank 0's alone; model, optimizer = ht.distribute(model, optimizer) trains one model on all. Updates "
            "without an optimizer need one, or gradients that comm.allreduce has averaged"
        )
    if _signs.has_own_group or _has_group() or others_imported() or "TF_CONFIG" in os.environ:
        return None
    strategy = " Strategies of tf.distribute need --backend multi_worker." if "tensorflow" in sys.modules else ""
    if "lightning.pytorch" in sys.modules:
        strategy = " Lightning's Trainer takes its devices from the run unless devices, or --trainer.devices, is given."
    return (
        f"the script never called ht.init(), nor torch.distributed's init_process_group(): unless it joins the other "
        f"ranks in another way, it runs {ranks} times, each rank by itself. help(hpctrain) shows the lines that make "
        f"it one training run.{strategy}"
    )


def _has_group() -> bool:
    """Whether torch.distributed has a default group of several processes."""
    groups = sys.modules.get("torch.distributed")
    return bool(groups and groups.is_available() and groups.is_initialized() and groups.get_world_size() > 1)
