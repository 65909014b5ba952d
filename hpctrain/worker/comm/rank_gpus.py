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
    own = gpu_number(comm)
    if any(comm.allgather_object(torch.cuda.device_count())):
        require_one_each(comm)
    return None if own is None else torch.device("cuda", own)


def gpu_number(comm: Communicator) -> int | None:
    """The number of this rank's GPU in PyTorch; None where there are fewer than ranks. Collective."""
    import torch

    local_rank, local_size = place_at_gpus(comm)
    return gpu_of(local_rank, local_size, torch.cuda.device_count(), shared=bool(SHARE_GPUS.read()))


def require_one_each(comm: Communicator) -> None:
    """Refuse ranks that would have to share GPUs, unless they are to. Collective."""
    import torch

    hosts = comm.allgather_object((comm.host, place_at_gpus(comm)[1], torch.cuda.device_count()))
    short = next((found for found in hosts if found[2] < found[1]), None)
    if short is None or SHARE_GPUS.read():
        return
    host, ranks, gpus = short
    raise HpctrainError(
        "HT-gpus-too-few",
        "backend {backend!r} needs a GPU for each rank: {host} has {ranks} ranks, PyTorch sees {gpus} GPUs there",
        "start fewer ranks, choose --backend gloo or mpi, or let them share GPUs to try things out: --share-gpus",
        backend=comm.backend,
        host=host,
        ranks=ranks,
        gpus=gpus,
    )


def place_at_gpus(comm: Communicator) -> tuple[int, int]:
    """This rank's number among those of its host that see the same GPUs, and how many these are. Collective."""
    seen = [gpu for host, gpu in comm.allgather_object((comm.host, only_gpu())) if host == comm.host]
    return (0, 1) if see_one_each(seen) and not SHARE_GPUS.read() else (comm.local_rank, comm.local_size)
