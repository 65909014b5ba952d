"""The communicator of the backend ``mirrored``: one process whose replicas tf.distribute synchronises."""

from __future__ import annotations

from typing import NoReturn

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import REPLICAS
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.comm.tf_cluster import replica_devices


class MirroredCommunicator(SingleCommunicator):
    """One rank, with a ``MirroredStrategy`` of as many replicas as the launcher says, or as there are GPUs."""

    backend = "mirrored"

    def __init__(self, reason: str) -> None:
        self.strategy = tf.distribute.MirroredStrategy(replica_devices(REPLICAS.read()))
        super().__init__(f"{reason}; {self.strategy.num_replicas_in_sync} replicas")

    def torch(self) -> NoReturn:
        raise not_for_torch(self.backend)

    def tensorflow(self) -> NoReturn:
        raise in_scope(self.backend)


def not_for_torch(backend: str) -> HpctrainError:
    """The error for a PyTorch model with a backend of tf.distribute."""
    return HpctrainError(
        "HT-backend-unfit",
        "backend {backend!r} is for TensorFlow, but this is PyTorch",
        "choose --backend mpi or gloo",
        backend=backend,
    )


def in_scope(backend: str) -> HpctrainError:
    """The error for ``ht.distribute`` where the strategy's scope distributes the model already."""
    return HpctrainError(
        "HT-backend-unfit",
        "backend {backend!r} distributes what is made in its scope, so ht.distribute has nothing to reduce",
        "make model and optimizer in `with ht.keras.strategy().scope():` and leave ht.distribute and ht.shard out; or "
        "choose --backend multi_worker, mpi or horovod",
        backend=backend,
    )
