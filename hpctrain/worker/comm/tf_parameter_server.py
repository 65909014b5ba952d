"""The communicator of the backend ``parameter_server``: a coordinator whose closures workers compute asynchronously."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.common.settings import PARAMETER_SERVERS, TIMEOUT_HINT
from hpctrain.worker.comm.mpi_collectives import duplicate
from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.comm.tf_cluster import (
    TfCluster,
    already_initialized,
    in_scope,
    join_cluster,
    not_for_torch,
    take_gpu,
)
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# A server's main thread only waits for the end, so it need not look often.
_POLL_SECONDS = 0.1


class ParameterServerCommunicator(SingleCommunicator):
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
        self._cluster: TfCluster | None = join_cluster(self._world, self.host, self.timeout, tasks)
        self.workers = workers
        if self.rank == 0:
            self._coordinate()

    def _coordinate(self) -> None:
        assert self._cluster is not None
        take_gpu(0, 1)
        try:
            with self.timeout.blocking("TensorFlow's servers of the other ranks"):
                self.strategy = tf.distribute.ParameterServerStrategy(self._cluster.resolver)
                self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        except (RuntimeError, ValueError) as error:
            raise already_initialized(error) from error
        self._fetching = concurrent.futures.ThreadPoolExecutor(1, "hpctrain-fetch")

    def serve(self) -> None:
        """Keep variables, or compute for the coordinator, until it leaves the run at the end of the training."""
        assert self._cluster is not None and self._world is not None
        resolver = self._cluster.resolver
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
            raise HpctrainError(
                "HT-wait-timed-out",
                "rank 0 on {host} waited {seconds:g} s for {awaited}",
                f"the logs of the other ranks say what they do; {TIMEOUT_HINT}",
                exit_code=1,
                host=self.host,
                seconds=self.timeout.seconds,
                awaited=what,
            ) from None

    def torch(self) -> NoReturn:
        raise not_for_torch(self.backend)

    def tensorflow(self) -> NoReturn:
        raise in_scope(self.backend)

    def abort(self, exit_code: int) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(exit_code)

    def shutdown(self) -> None:
        if self._world is None:
            return
        self._fetching.shutdown(wait=False)
        # The servers poll this barrier, and end with it.
        self.timeout.wait(self._world.Ibarrier().Test, "the end of TensorFlow's servers")
        self._leave()

    def _leave(self) -> None:
        assert self._cluster is not None
        if self._cluster.reserved is not None:
            self._cluster.reserved.close()
        self._cluster = self._world = None
