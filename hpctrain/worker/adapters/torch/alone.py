"""What a rank's optimizer has trained, where next to nothing was sent to the other ranks: the launcher compares it.

A script can make a process group, meet the others in barriers and average its metrics, and still train by itself: as
those do that wrap their model only where there is a GPU. Data, tensor and pipeline parallel training, and averages of
parameters, all send more than a few numbers a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpctrain.common.run.records import OwnTraining
from hpctrain.common.settings import RANKS_ALONE
from hpctrain.worker.comm import Communicator, knows_others
from hpctrain.worker.comm.process_group.group import HpctrainGroup

# A loss and an accuracy, as scripts average them for their logs.
_BYTES_A_STEP = 16

_comm: Communicator | None = None
_parameters: list[torch.Tensor] = []
_steps = _before = 0
# Whether the script has groups whose traffic is not seen here.
_other_groups = False


def watch(comm: Communicator) -> None:
    """Note from now on what optimizers train. Idempotent."""
    global _comm
    if _comm is None and comm.size > 1 and not RANKS_ALONE.read():
        register_optimizer_step_post_hook(_note_step)
    _comm = comm


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _parameters, _steps, _before, _other_groups
    _steps += 1
    if _steps == 1:
        # What sends equal weights to all ranks comes before.
        _before = HpctrainGroup.moved
    _parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    _other_groups |= any(not isinstance(group, HpctrainGroup) for group in dist.distributed_c10d._world.pg_map)


def own_training() -> OwnTraining | None:
    """What this rank has trained by itself; None where it has trained with others, or it is not known."""
    if _comm is None or _steps < 2 or _other_groups or knows_others() or _comm.reduced_by_hand:
        return None
    moved = HpctrainGroup.moved - _before
    if moved > _BYTES_A_STEP * _steps or moved >= sum(each.nbytes for each in _parameters):
        return None
    values = xxhash.xxh3_64()
    for each in _parameters:
        values.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return OwnTraining(shapes=str([tuple(each.shape) for each in _parameters]), values=values.hexdigest())
