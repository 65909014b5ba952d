"""The communicator of the backend ``multi_worker``: a rank is a worker of TensorFlow's MultiWorkerMirroredStrategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import tensorflow as tf

from hpctrain.worker.comm.control_tensors import ControlTensorFlowEngine
from hpctrain.worker.comm.mpi import MpiControl
from hpctrain.worker.comm.tf_cluster import TfCluster, already_initialized, join_cluster, not_for_torch, take_gpu

if TYPE_CHECKING:
    from mpi4py import MPI

# The key of this engine's group, out of reach of the strategy's own, which count from 1.
_GROUP = 1 << 20


class MultiWorkerCommunicator(MpiControl):
    """Ranks started by MPI whose gradients TensorFlow's collectives reduce: rings over gRPC, or NCCL on GPUs.

    The servers are those of :attr:`strategy`, a MultiWorkerMirroredStrategy that custom loops may use too.
    """

    backend = "multi_worker"
    strategy: tf.distribute.MultiWorkerMirroredStrategy

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._engine: MultiWorkerEngine | None = None
        self._cluster: TfCluster | None = join_cluster(self._world, self.host, self.timeout, ["worker"] * self.size)
        try:
            take_gpu(self.local_rank, self.local_size)
            with self.timeout.blocking("starting TensorFlow's servers"):
                self.strategy = tf.distribute.MultiWorkerMirroredStrategy(self._cluster.resolver)
        except RuntimeError as error:
            raise already_initialized(error) from error

    def torch(self) -> NoReturn:
        raise not_for_torch(self.backend)

    def tensorflow(self) -> MultiWorkerEngine:
        if self._engine is None:
            self._engine = MultiWorkerEngine(self)
        return self._engine

    def _free(self) -> None:
        if self._cluster is not None and self._cluster.reserved is not None:
            self._cluster.reserved.close()
        self._cluster = None
        super()._free()


class MultiWorkerEngine(ControlTensorFlowEngine):
    """Reduces TensorFlow tensors on their device, with one collective per type for all gradients of a step."""

    def __init__(self, comm: MultiWorkerCommunicator) -> None:
        super().__init__(comm)
        self._size = comm.size
        self._seconds = comm.timeout.seconds
        self._device = comm.strategy.extended.worker_devices[0]
        # The instance keys of the collectives by name. All ranks ask in the same order, so the keys agree.
        self._keys: dict[str, int] = {}

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        means = list(tensors)
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = tf.concat([tf.reshape(tensors[index], [-1]) for index in members], axis=0)
            travelling = wire if wire and wire.size < dtype.size else dtype
            total = self._sum(tf.cast(flat, travelling), f"{name}.{dtype.name}")
            mean = tf.cast(total, dtype) / self._size
            parts = tf.split(mean, [tf.size(tensors[index]) for index in members])
            for index, part in zip(members, parts, strict=True):
                means[index] = tf.ensure_shape(tf.reshape(part, tf.shape(tensors[index])), tensors[index].shape)
        return means

    def _sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        key = self._keys.setdefault(name, len(self._keys) + 1)
        with tf.device(self._device):
            return tf.raw_ops.CollectiveReduceV2(
                input=flat,
                group_size=self._size,
                group_key=_GROUP,
                instance_key=_GROUP + key,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                timeout_seconds=self._seconds,
            )
