"""torch.distributed's default group for frameworks that distribute by themselves: that of the run's backend."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.records import OwnTraining
from hpctrain.common.settings import RANKS_ALONE, TIMEOUT
from hpctrain.worker.adapters.recording import recording
from hpctrain.worker.adapters.torch.optimizer_contents import learning_rate, parameters_of
from hpctrain.worker.comm import Communicator, current, forks
from hpctrain.worker.comm.forgotten import note_own_group
from hpctrain.worker.comm.process_group.group import NAME, HpctrainGroup
from hpctrain.worker.comm.rank_run import run

# The groups of --backend nccl, whose collectives are NCCL's or Gloo's by the device of a tensor.
_ON_BOTH = "cpu:gloo,cuda:nccl"


class _Script:
    """Whether the script has asked for the default group, of which backend, and whether its steps are recorded."""

    joined = recorded = False
    backend: str | None = None


_script = _Script()


def init_process_group(original: Callable[..., None], *arguments: Any, **settings: Any) -> None:
    """``init_process_group``: one for all ranks joins the run's default group, others are PyTorch's ``original``."""
    _script.joined = _script.joined and dist.is_initialized()
    given = inspect.signature(original).bind(*arguments, **settings).arguments
    # The URL that a script makes of the variables of this run's store.
    address = f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    own = given.get("store") is not None or given.get("init_method") not in (None, "env://", address)
    # Forks that a script starts as ranks of its own.
    own = own or (forks.is_fork() and given.get("world_size", -1) > 0)
    # PyTorch raises its own error for a second call; but the group of ht.init() is the one that a first call asks for.
    if own or _script.joined:
        original(*arguments, **settings)
        _script.joined = True
        note_own_group()
        return
    if (limit := given.get("timeout")) is not None:
        os.environ[TIMEOUT.name] = f"{limit.total_seconds():g}"
    asked = given.get("backend")
    _script.backend = None if asked is None else str(asked)
    comm = current()
    comm.process_group()
    _record_steps(comm)
    if comm.backend == "mpi":
        _watch_training(comm)
    _script.joined = True
    for name, found in (("rank", comm.rank), ("world_size", comm.size)):
        if given.get(name, -1) not in (-1, found):
            raise HpctrainError(
                "HT-group-made-otherwise",
                "init_process_group({name}={value}), but in the run it is {found}",
                "leave it out, or give the script's framework as many devices and nodes as the run has",
                name=name,
                value=given[name],
                found=found,
            )


def get_backend(original: Callable[..., str], *arguments: Any, **settings: Any) -> dist.Backend:
    """``get_backend``: of the run's groups the name that the script asked for, by which libraries choose what they do.

    A script that named none is told a name that those know which wrap a model for some backends only.
    """
    found = original(*arguments, **settings)
    shown = {NAME: _script.backend or "mpi", _ON_BOTH: _script.backend or found}
    return dist.Backend(shown.get(found, found))


def new_group(original: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """``new_group``: of the run's own kind where the script asks for the one that its default group seems to be."""
    bound = inspect.signature(original).bind(*arguments, **settings)
    if bound.arguments.get("backend") == (_script.backend or "mpi") and isinstance(dist.group.WORLD, HpctrainGroup):
        bound.arguments["backend"] = None
    return original(*bound.args, **bound.kwargs)


def _record_steps(comm: Communicator) -> None:
    """Record the steps of the first optimizer that makes one, on rank 0. Idempotent."""
    own = recording()
    if own is None or _script.recorded:
        return
    _script.recorded = True

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = sum(each.numel() for each in parameters_of(optimizer))
        if own.begin_run(comm, "torch", optimizer, parameters):
            own.step_done(learning_rate(optimizer))

    register_optimizer_step_post_hook(stepped)


# A loss and an accuracy, as scripts average them for their logs.
_BYTES_A_STEP = 16


class _OwnSteps:
    """The steps of this process's optimizers.

    Attributes:
        comm: the ranks; None while nothing is watched.
        parameters: those that the last step has updated.
        steps: how many there were.
        before: what was sent before the second of them began: equal weights for all ranks, for example.
        other_groups: whether the script has groups whose traffic is not seen here.
    """

    comm: Communicator | None = None
    parameters: Sequence[torch.Tensor] = ()
    steps = before = 0
    other_groups = False

    def note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.steps += 1
        if self.steps == 1:
            self.before = HpctrainGroup.moved
        self.parameters = [each for each in parameters_of(optimizer) if each.grad is not None]
        self.other_groups |= any(not isinstance(group, HpctrainGroup) for group in dist.distributed_c10d._world.pg_map)


_own = _OwnSteps()


def _watch_training(comm: Communicator) -> None:
    """Note from now on what optimizers train. Idempotent."""
    if _own.comm is None and comm.size > 1 and not RANKS_ALONE.read():
        register_optimizer_step_post_hook(_own.note)
    _own.comm = comm


def own_training() -> OwnTraining | None:
    """What this rank has trained by itself; None where it has trained with others, or it is not known."""
    if _own.comm is None or _own.steps < 2 or _own.other_groups or run.knows_others or _own.comm.reduced_by_hand:
        return None
    moved = HpctrainGroup.moved - _own.before
    if moved > _BYTES_A_STEP * _own.steps or moved >= sum(parameter.nbytes for parameter in _own.parameters):
        return None
    values = xxhash.xxh3_64()
    for parameter in _own.parameters:
        values.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return OwnTraining(shapes=str([tuple(parameter.shape) for parameter in _own.parameters]), values=values.hexdigest())
