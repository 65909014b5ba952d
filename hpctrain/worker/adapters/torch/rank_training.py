"""What a rank's optimizer has trained, where next to nothing was sent to the other ranks: the launcher compares it.

A script can make a process group, meet the others in barriers and average its metrics, and still train by itself: as
those do that wrap their model only where there is a GPU. Data, tensor and pipeline parallel training, and averages of
parameters, all send more than a few numbers a step.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self.parameters = [
            each for group in optimizer.param_groups for each in group["params"] if each.grad is not None
        ]
        self.other_groups |= any(not isinstance(group, HpctrainGroup) for group in dist.distributed_c10d._world.pg_map)


_own = _OwnSteps()


def watch(comm: Communicator) -> None:
    """Note from now on what optimizers train. Idempotent."""
    if _own.comm is None and comm.size > 1 and not RANKS_ALONE.read():
        register_optimizer_step_post_hook(_own.note)
    _own.comm = comm


def own_training() -> OwnTraining | None:
    """What this rank has trained by itself; None where it has trained with others, or it is not known."""
    if _own.comm is None or _own.steps < 2 or _own.other_groups or knows_others() or _own.comm.reduced_by_hand:
        return None
    moved = HpctrainGroup.moved - _own.before
    if moved > _BYTES_A_STEP * _own.steps or moved >= sum(parameter.nbytes for parameter in _own.parameters):
        return None
    values = xxhash.xxh3_64()
    for parameter in _own.parameters:
        values.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return OwnTraining(shapes=str([tuple(parameter.shape) for parameter in _own.parameters]), values=values.hexdigest())
