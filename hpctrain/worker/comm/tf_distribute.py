"""The backends of tf.distribute: ``mirrored``, ``multi_worker`` and ``parameter_server``."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import PARAMETER_SERVERS, REPLICAS
from hpctrain.worker.comm.addresses import write_tf_config
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.engines import TorchEngine
from hpctrain.worker.comm.mpi import MpiControl
from hpctrain.worker.comm.mpi_collectives import duplicate
from hpctrain.worker.comm.rank_gpus import place_at_gpus
from hpctrain.worker.comm.shared.tensorflow_engine import ControlTensorFlowEngine
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# The key of this engine's group, out of reach of the strategy's own, which count from 1.
_GROUP = 1 << 20
# A server's main thread only waits for the end, so it need not look often.
_POLL_SECONDS = 0.1


def take_gpu(local_rank: int, local_size: int) -> None:
    """Use the GPU of this local rank where there is one for each rank, or else only the CPU.

    NCCL does not let two ranks share a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    own = slice(local_rank, local_rank + 1) if len(gpus) >= local_size else slice(0)
    tf.config.set_visible_devices(gpus[own], "GPU")


def replica_devices(replicas: int | None) -> list[str]:
    """The devices of replicas within this process: GPUs where there are any, or else virtual CPUs.

    None makes one replica per GPU, or a single one without GPUs.
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
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise already_initialized(error) from error
    return [f"CPU:{number}" for number in range(count)]


def already_initialized(error: Exception) -> HpctrainError:
    """The error where TensorFlow has computed something before the strategy was made."""
    return HpctrainError(
        "HT-tensorflow-already-started",
        "TensorFlow has already set up its devices, so a strategy can no longer be made: {reason}",
        "call ht.init() first, before the script makes a tensor, a variable or a model",
        reason=str(error),
    )


class _OfScope(SingleCommunicator):
    """One rank whose strategy distributes what is made in its scope."""

    def torch(self) -> TorchEngine:
        return Communicator.torch(self)

    def tensorflow(self) -> NoReturn:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} distributes what is made in its scope, so ht.distribute has nothing to reduce",
            "make model and optimizer in `with ht.keras.strategy().scope():` and leave ht.distribute and ht.shard out; "
            "or choose --backend multi_worker, mpi or horovod",
            backend=self.backend,
        )


class MirroredCommunicator(_OfScope):
    """One rank, with a ``MirroredStrategy`` of as many replicas as the launcher says, or as there are GPUs."""

    backend = "mirrored"

    def __init__(self, reason: str) -> None:
        self.strategy = tf.distribute.MirroredStrategy(replica_devices(REPLICAS.read()))
        super().__init__(f"{reason}; {self.strategy.num_replicas_in_sync} replicas")


class MultiWorkerCommunicator(MpiControl):
    """Ranks started by MPI whose gradients TensorFlow's collectives reduce: rings over gRPC, or NCCL on GPUs.

    The servers are those of :attr:`strategy`, a MultiWorkerMirroredStrategy that custom loops may use too.
    """

    backend = "multi_worker"
    strategy: tf.distribute.MultiWorkerMirroredStrategy

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._engine: MultiWorkerEngine | None = None
        self._reserved = write_tf_config(self._world, self.host, self.timeout, ["worker"] * self.size)
        try:
            take_gpu(*place_at_gpus(self))
            with self.timeout.blocking("starting TensorFlow's servers"):
                resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
                self.strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
        except RuntimeError as error:
            raise already_initialized(error) from error

    def tensorflow(self) -> MultiWorkerEngine:
        if self._engine is None:
            self._engine = MultiWorkerEngine(self)
        return self._engine

    def _free(self) -> None:
        self._reserved.close()
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


class ParameterServerCommunicator(_OfScope):
    """Rank 0 runs the script; the next ranks keep the variables, and the remaining ones compute.

    Ranks other than 0 only :meth:`serve`.
    """

    backend = "parameter_server"

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        servers = PARAMETER_SERVERS.read()
        workers = world.size - 1 - servers
        if workers < 1:
            raise HpctrainError(
                "HT-ranks-too-few",
                "backend 'parameter_server' needs a coordinator, {servers} for the parameters "
                "({variable}) and at least one worker, but there are {ranks} ranks",
                f"-np {servers + 2} or more",
                servers=servers,
                variable=PARAMETER_SERVERS.name,
                ranks=world.size,
            )
        super().__init__(f"{reason}; {workers} workers, {servers} for the parameters")
        self.rank = world.rank
        self.timeout = Timeout(f"rank {world.rank} on {self.host}")
        self._world: MPI.Intracomm | None = duplicate(world, self.timeout, "joining the run")
        # Calls to a worker that is gone fail at once, so that its closures go to others.
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
        tasks = ["chief", *["ps"] * servers, *["worker"] * workers]
        self._reserved = write_tf_config(self._world, self.host, self.timeout, tasks)
        self._resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self.workers = workers
        # Each worker has a GPU, and the coordinator one that is left: each would take the memory of all that it sees.
        hosts = self._world.allgather(self.host)
        here = [rank for rank in range(1 + servers, world.size) if hosts[rank] == self.host]
        if self.rank in here:
            take_gpu(here.index(self.rank), len(here))
        elif self.rank == 0:
            take_gpu(len(here), len(here) + 1)
        else:
            tf.config.set_visible_devices([], "GPU")
        if self.rank == 0:
            self._coordinate()

    def _coordinate(self) -> None:
        try:
            with self.timeout.blocking("TensorFlow's servers of the other ranks"):
                self.strategy = tf.distribute.ParameterServerStrategy(self._resolver)
                self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        except (RuntimeError, ValueError) as error:
            raise already_initialized(error) from error
        self._fetching = concurrent.futures.ThreadPoolExecutor(1, "hpctrain-fetch")

    def serve(self) -> None:
        """Keep variables, or compute for the coordinator, until it leaves the run at the end of the training."""
        assert self._world is not None
        resolver = self._resolver
        tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol=resolver.rpc_layer or "grpc"
        )
        end = self._world.Ibarrier()
        while not end.Test():
            time.sleep(_POLL_SECONDS)
        self._leave()

    def fetch(self, value: Any) -> Any:
        """The result of a closure that was scheduled."""
        return self._within_limit(value.fetch, "a worker's step")

    def join(self) -> None:
        """Wait for all closures that were scheduled; raises as :meth:`fetch` does, and what a closure raised."""
        self._within_limit(self.coordinator.join, "the workers' steps")

    def _within_limit(self, wait: Callable[[], Any], what: str) -> Any:
        try:
            return self._fetching.submit(wait).result(self.timeout.seconds)
        except concurrent.futures.TimeoutError:
            raise self.timeout.out_of_time(what) from None

    def shutdown(self) -> None:
        if self._world is None:
            return
        self._fetching.shutdown(wait=False)
        # The servers poll this barrier, and end with it.
        self.timeout.wait(self._world.Ibarrier().Test, "the end of TensorFlow's servers")
        self._leave()

    def _leave(self) -> None:
        self._reserved.close()
        self._world = None
