"""The GPU of a rank among those that it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.common.cluster.gpus import gpu_of, only_gpu, see_one_each
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm.base import Communicator

if TYPE_CHECKING:
    import torch


def rank_gpu(comm: Communicator) -> torch.device | None:
    """The GPU of this rank in PyTorch: each rank has one, or they share them, or all use the CPU. Collective."""
    import torch

    if comm.in_host_memory:
        return None
    local_rank, local_size = place_at_gpus(comm)
    own = gpu_of(local_rank, local_size, torch.cuda.device_count(), shared=bool(SHARE_GPUS.read()))
    return None if own is None else torch.device("cuda", own)


def place_at_gpus(comm: Communicator) -> tuple[int, int]:
    """This rank's number among those of its host that see the same GPUs, and how many these are. Collective."""
    seen = [gpu for host, gpu in comm.allgather_object((comm.host, only_gpu())) if host == comm.host]
    return (0, 1) if see_one_each(seen) and not SHARE_GPUS.read() else (comm.local_rank, comm.local_size)
