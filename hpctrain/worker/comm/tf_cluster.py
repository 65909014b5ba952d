"""tf.distribute's view of the ranks: the addresses of TensorFlow's servers, and the devices of this process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import REPLICAS
from hpctrain.worker.comm.addresses import write_tf_config
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, kw_only=True)
class TfCluster:
    """The place of this process among TensorFlow's servers.

    Attributes:
        resolver: names all servers of the cluster, for a strategy or a server.
        reserved: the socket that reserves this process's port for its server; to be closed with the run.
    """

    resolver: tf.distribute.cluster_resolver.ClusterResolver
    task: str
    reserved: socket.socket | None


def join_cluster(world: MPI.Intracomm, host: str, timeout: Timeout, tasks: Sequence[str]) -> TfCluster:
    """Tell all ranks each other's addresses, and write them to ``TF_CONFIG`` of this process. Collective.

    Args:
        tasks: ``chief``, ``worker`` or ``ps``, for every rank.
    """
    reserved = write_tf_config(world, host, timeout, tasks)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return TfCluster(resolver=resolver, task=tasks[world.rank], reserved=reserved)


def take_gpu(local_rank: int, local_size: int) -> None:
    """Use the GPU of this local rank where there is one for each rank, or else only the CPU.

    NCCL does not let two ranks share a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    own = slice(local_rank, local_rank + 1) if len(gpus) >= local_size else slice(0)
    tf.config.set_visible_devices(gpus[own], "GPU")


def replica_devices(replicas: int | None) -> list[str]:
    """The devices of replicas within this process: GPUs where there are any, or else virtual CPUs.

    Args:
        replicas: None for one per GPU, or a single one without GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    count = replicas or len(gpus) or 1
    if gpus:
        if count > len(gpus):
            raise HpctrainError(
                "HT-gpus-too-few",
                "{replicas} replicas, but this process sees {gpus} GPUs",
                f"-np {len(gpus)}, or CUDA_VISIBLE_DEVICES= for replicas on the CPU",
                replicas=count,
                gpus=len(gpus),
            )
        return [f"GPU:{number}" for number in range(count)]
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    _configure(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"CPU:{number}" for number in range(count)]


def _configure(cpu: Any, logical: Sequence[Any]) -> None:
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:
        raise already_initialized(error) from error


def already_initialized(error: Exception) -> HpctrainError:
    """The error where TensorFlow has computed something before the strategy was made."""
    return HpctrainError(
        "HT-tensorflow-already-started",
        "TensorFlow has already set up its devices, so a strategy can no longer be made: {reason}",
        "call ht.init() first, before the script makes a tensor, a variable or a model",
        reason=str(error),
    )


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
