"""torch.distributed's default group for frameworks that distribute by themselves: that of the run's backend."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.recording import recording
from hpctrain.worker.adapters.torch.recording import learning_rate
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.process_group import require_default_group
from hpctrain.worker.comm.torchrun import set_torchrun_variables

_records = False


def join_default_group(asked: str | None = None) -> Communicator:
    """Join the run, and create torch.distributed's default group of its ranks unless there is one. Collective.

    It also sets torchrun's variables for this rank, and records the steps of the first optimizer.

    Args:
        asked: the backend of torch.distributed that the caller asked for.

    Raises:
        HpctrainError: a backend without process groups, or one for the CPU's memory though the caller is on GPUs.
    """
    comm = current()
    if "nccl" in (asked or "") and comm.backend in ("mpi", "gloo"):
        raise HpctrainError(
            "HT-backend-not-on-gpu",
            "the script asks torch.distributed for {asked}, which is for tensors on GPUs, but --backend "
            "{backend} moves tensors in the CPU's memory",
            "choose --backend nccl, or train on CPUs: accelerator='cpu' in Lightning, ACCELERATE_USE_CPU=true for "
            "Accelerate and Transformers",
            asked=asked,
            backend=comm.backend,
        )
    require_default_group(comm)
    set_torchrun_variables(comm)
    _record_steps(comm)
    return comm


def give_default_group() -> None:
    """From now on ``init_process_group`` for all ranks joins the run's default group in this process. Idempotent."""
    original = distributed_c10d.init_process_group
    if hasattr(original, "of_the_run"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **settings: Any) -> None:
        given = signature.bind(*arguments, **settings).arguments
        own = given.get("store") is not None or given.get("init_method") not in (None, "env://")
        # PyTorch raises its own error for a second call.
        if own or dist.is_initialized():
            original(*arguments, **settings)
            return
        backend = given.get("backend")
        comm = join_default_group(None if backend is None else str(backend))
        for name, found in (("rank", comm.rank), ("world_size", comm.size)):
            if given.get(name, -1) not in (-1, found):
                raise HpctrainError(
                    "HT-group-different-settings",
                    "init_process_group({name}={value}), but in the run it is {found}",
                    "leave it out, or give the script's framework as many devices and nodes as the run has",
                    name=name,
                    value=given[name],
                    found=found,
                )

    init_process_group.of_the_run = True  # type: ignore[attr-defined]
    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def _record_steps(comm: Communicator) -> None:
    """Record the steps of the first optimizer that makes one, on rank 0. Idempotent."""
    global _records
    own = recording()
    if own is None or _records:
        return
    _records = True

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
        if own.begin_run(comm, "torch", optimizer, parameters):
            own.step_done(learning_rate(optimizer))

    register_optimizer_step_post_hook(stepped)
