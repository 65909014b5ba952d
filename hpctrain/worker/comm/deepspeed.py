"""The communicator of the backend ``deepspeed``: torch.distributed's group for DeepSpeed, which trains by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.deepspeed_checks import watch_deepspeed
from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator
from hpctrain.worker.comm.torchrun import set_torchrun_variables

if TYPE_CHECKING:
    from mpi4py import MPI


class DeepSpeedCommunicator(TorchDistributedCommunicator):
    """Ranks started by MPI, in a group that ``deepspeed.initialize`` finds and takes: NCCL with a GPU a rank, or Gloo.

    Raises:
        HpctrainError: as of :class:`TorchDistributedCommunicator`.
    """

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        from mpi4py import MPI

        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        gpus = world.allreduce(torch.cuda.device_count() >= node.size, MPI.LAND)
        node.Free()
        super().__init__("nccl" if gpus else "gloo", f"{reason}; over {'NCCL' if gpus else 'Gloo'}", world)
        self.backend = "deepspeed"
        # It has a proof of its own neither for nor against: what a script trains with it is distributed.
        self.distributed = True
        set_torchrun_variables(self)
        # Or else it takes GPUs that it sees, where there are too few for the ranks too.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpus else "cpu")
        watch_deepspeed()

    def torch(self) -> NoReturn:
        raise HpctrainError(
            "ht.distribute under --backend deepspeed: deepspeed.initialize already distributes the model",
            "leave ht.distribute out, or choose --backend nccl, mpi or gloo",
        )
