"""The baselines of the benchmarks: Horovod and PyTorch's own group, started beside hpctrain's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mpi4py import MPI

from hpctrain.common.cluster.gpus import only_gpu, see_one_each
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.horovod import HorovodCommunicator
from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator

LeftOut = dict[str, str]


def load_horovod(world: MPI.Intracomm, left_out: LeftOut) -> HorovodCommunicator | None:
    """A communicator over a Horovod that is not running yet (see :func:`horovod_running`); or None, and the reason."""
    communicator = HorovodCommunicator(world, "measured")
    try:
        communicator.torch()
    except HpctrainError as error:
        left_out["horovod"] = error.message
        return None
    import horovod.torch as hvd

    world.Barrier()
    hvd.shutdown()
    return communicator


@contextmanager
def horovod_running(world: MPI.Intracomm) -> Iterator[None]:
    """Run Horovod's background thread within the block; it polls for work every millisecond.

    The polling slows the rest of the process: MPI_Allreduce of 4 MB takes three to six times as long (two ranks on two
    cores). So the thread runs only while Horovod is measured; starting and ending it takes 1 ms.
    """
    import horovod.torch as hvd

    hvd.init()
    yield
    # Horovod ends on all ranks as soon as one of them asks for it.
    world.Barrier()
    hvd.shutdown()


def join_process_group(world: MPI.Intracomm) -> TorchDistributedCommunicator:
    """Make the ranks PyTorch's default process group: over Gloo, and also over NCCL where each has a GPU."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = 1 if see_one_each(node.allgather(only_gpu())) else node.size
    gpus = world.allreduce(torch.cuda.device_count() >= ranks, MPI.LAND)
    return TorchDistributedCommunicator("nccl" if gpus else "gloo", "measured", world)
