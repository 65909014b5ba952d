"""The GPU of a rank among those that it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.common.cluster.gpus import gpu_of, only_gpu, see_one_each
from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm.base import Communicator

if TYPE_CHECKING:
    import torch


def rank_gpu(comm: Communicator) -> torch.device | None:
    """The GPU of this rank in PyTorch: each rank has one, or they share them, or all use the CPU. Collective.

    Raises:
        HpctrainError: some ranks have a GPU, and not all.
    """
    import torch

    if comm.in_host_memory:
        return None
    own = gpu_number(comm, required=any(comm.allgather_object(torch.cuda.device_count())))
    return None if own is None else torch.device("cuda", own)


def gpu_number(comm: Communicator, *, required: bool) -> int | None:
    """The number of this rank's GPU in PyTorch; None where its host has fewer than ranks that do not share. Collective.

    Args:
        required: refuse any host with fewer.

    Raises:
        HpctrainError: there is such a host.
    """
    import torch

    shared, gpus = bool(SHARE_GPUS.read()), torch.cuda.device_count()
    local_rank, local_size = place_at_gpus(comm)
    hosts = comm.allgather_object((comm.host, local_size, gpus))
    short = next((found for found in hosts if found[2] < found[1]), None)
    if required and short and not shared:
        raise HpctrainError(
            "HT-gpus-too-few",
            "backend {backend!r} needs a GPU for each rank: {host} has {ranks} ranks, PyTorch sees {gpus} GPUs there",
            "start fewer ranks, choose --backend gloo or mpi, or let them share GPUs to try things out: --share-gpus",
            backend=comm.backend,
            host=short[0],
            ranks=short[1],
            gpus=short[2],
        )
    return gpu_of(local_rank, local_size, gpus, shared=shared)


def place_at_gpus(comm: Communicator) -> tuple[int, int]:
    """This rank's number among those of its host that see the same GPUs, and how many these are. Collective."""
    seen = [gpu for host, gpu in comm.allgather_object((comm.host, only_gpu())) if host == comm.host]
    return (0, 1) if see_one_each(seen) and not SHARE_GPUS.read() else (comm.local_rank, comm.local_size)
