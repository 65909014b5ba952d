"""The GPU of a rank, as PyTorch numbers those that it sees."""

from __future__ import annotations

import torch

from hpctrain.common.cluster.gpus import gpu_of, only_gpu
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm.base import Communicator


def rank_gpu(comm: Communicator) -> torch.device | None:
    """The GPU of this rank: each rank has one, or they share them, or all use the CPU. Collective."""
    if comm.in_host_memory:
        return None
    local_rank, local_size = place_at_gpus(comm)
    own = gpu_of(local_rank, local_size, torch.cuda.device_count(), shared=bool(SHARE_GPUS.read()))
    return None if own is None else torch.device("cuda", own)


def place_at_gpus(comm: Communicator) -> tuple[int, int]:
    """This rank's number among those of its host that see the same GPUs, and how many these are. Collective."""
    seen = {gpu for host, gpu in comm.allgather_object((comm.host, only_gpu())) if host == comm.host and gpu}
    # A batch system may give each rank a GPU that it alone sees.
    apart = len(seen) == comm.local_size and not SHARE_GPUS.read()
    return (0, 1) if apart else (comm.local_rank, comm.local_size)
