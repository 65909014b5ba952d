"""Says that a pickled tensor of a sharded model is one rank's part: ``torch.save`` on rank 0 writes nothing else."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpctrain.worker.comm import Communicator

_watched = _said = False


def say_when_pickled(comm: Communicator) -> None:
    """From now on, say once on this rank that it pickles its part of a tensor.

    Not an error: every rank may write a file of its own, for as many ranks to read. torch.distributed.checkpoint, and
    the states that ``full_state_dict`` makes, pickle no such tensor.
    """
    global _watched
    if _watched or comm.size == 1:
        return
    _watched = True
    name = f"rank {comm.rank} on {comm.host}"

    def reduce(tensor: DTensor, protocol: Any) -> Any:
        global _said
        if not _said and any(placement.is_shard() for placement in tensor.placements):
            _said = True
            print(
                f"hpctrain: {name} pickles its part of a sharded tensor ({tuple(tensor.to_local().shape)} of "
                f"{tuple(tensor.shape)}), as torch.save does: a file of rank 0 lacks the other ranks' parts. Save with "
                "torch.distributed.checkpoint; or call get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)) on all ranks and save what rank 0 gets (docs/scripts.md, "
                "Resuming)",
                file=sys.stderr,
                flush=True,
            )
        return torch.Tensor.__reduce_ex__(tensor, protocol)  # type: ignore[no-untyped-call]

    DTensor.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]
