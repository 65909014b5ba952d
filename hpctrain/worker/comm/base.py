"""The interface of all communicators.

The control plane (rank, size, objects, small arrays, barrier) is the same for all. The data plane, which
reduces the gradients, is an engine of its own for each framework, reached through :meth:`Communicator.torch`
and :meth:`Communicator.tensorflow`.
"""

from __future__ import annotations

import pickle  # objects of the ranks of one run
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.bucket_groups import BUCKET_BYTES
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.stderr import tell

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

    from hpctrain.common.recipes.mesh import Mesh
    from hpctrain.worker.comm.engines import TensorFlowEngine, TorchEngine
    from hpctrain.worker.comm.parameter_server import ParameterServer

T = TypeVar("T")
Reduction = Literal["mean", "sum", "min", "max"]
FloatArray = NDArray[np.float64]
AnyArray = NDArray[Any]
SUMMING = "summing over a group of ranks"


class RanksLostError(HpctrainError):
    """Ranks of the run died. The others can continue after :meth:`Communicator.recover`."""

    def __init__(self, code: str, sentence: str, /, **values: Any) -> None:
        hint = "hpctrain run --resume continues from the last checkpoint"
        super().__init__(code, sentence, hint, exit_code=RESUMABLE, **values)


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """A rank that died: its number in the run before, its number at the start of the run, and its host."""

    rank: int
    first_rank: int
    host: str


class Group(ABC):
    """A group of neighbouring ranks that add arrays up in the middle of a step, while gradients may be reduced.

    Every rank of the group calls it in the same order, from one thread at a time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def allreduce(self, array: AnyArray) -> AnyArray:
        """The sum of a small array over the ranks of this rank's group."""

    def allreduce_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a PyTorch tensor over the ranks of this rank's group, on its device."""
        import torch

        return torch.from_numpy(self.allreduce(tensor.cpu().numpy())).to(tensor.device)

    def rows(self, own: AnyArray) -> AnyArray:
        """The equally long arrays of all ranks as rows, in rank order."""
        everyone = np.zeros((self.size, *own.shape), own.dtype)
        everyone[self.rank] = own
        return self.allreduce(everyone)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        padded = np.zeros(self.rows(np.array([len(own)])).max(), np.uint8)
        padded[: len(own)] = own
        # A pickle marks its own end, so the zeros behind it do no harm.
        return [pickle.loads(row.data) for row in self.rows(padded)]  # noqa: S301 - ranks of this very run

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value."""
        sent = np.frombuffer(pickle.dumps(value) if self.rank == 0 else b"", np.uint8)
        length = int(self.allreduce(np.array([len(sent)]))[0])
        received = self.allreduce(sent if len(sent) else np.zeros(length, np.uint8))
        return pickle.loads(received.data)  # type: ignore[no-any-return]  # noqa: S301 - rank 0 of this very run


class Communicator(ABC):
    """The ranks of one run, and the place of this process among them. Every rank calls collective methods alike.

    Attributes:
        backend: what reduces the gradients, a name of hpctrain.common.cluster.backends.CAPABILITIES.
        reason: one sentence on why this backend was chosen.
        distributed: whether ``ht.distribute`` got a model, or the script asked for process groups.
        reduced_by_hand: whether the script reduced an array of several numbers itself.
        divides_batches: whether ``ht.shard`` got a DataLoader.
        mesh: the mesh that the ranks form; None for that of the launch.
        left: whether :func:`hpctrain.shutdown` has left the run.
        passes: how many backward passes this rank has begun, for messages; the adapter counts.
        in_host_memory: whether gradients are reduced in the CPU's memory only; hpctrain then keeps its models there.
        measures_links: whether there is :meth:`seconds_of_message`, on the links over which gradients travel.
        strategy: the tf.distribute strategy of backends that are one.
    """

    in_host_memory = measures_links = False
    strategy: tf.distribute.Strategy | None = None
    mesh: Mesh | None = None
    backend: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.passes = 0
        self.left = self.distributed = self.reduced_by_hand = self.divides_batches = False
        self.host = socket.gethostname()
        self._leaving: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._last_checks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._kept: list[object] = []
        self._kept_groups: dict[str, Group] = {}
        self._parts: dict[str, Any] = {}

    @property
    def bucket_bytes(self) -> float:
        """The default size of the buckets in which gradients are reduced."""
        return BUCKET_BYTES

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size} on {self.host}>"

    def part(self, name: str, make: Callable[[], T]) -> T:
        """What an adapter keeps for these ranks under a name as long as they are a run; made at the first call."""
        if name not in self._parts:
            self._parts[name] = make()
        part: T = self._parts[name]
        return part

    def trains_together(self) -> bool:
        """Whether the script has used what makes one training run of the ranks, as far as can be known."""
        return self.distributed or self.reduced_by_hand

    # The control plane. Every method is collective: all ranks call it, in the same order.

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def broadcast_object(self, value: T) -> T:
        """Rank 0's ``value``, on every rank."""

    @abstractmethod
    def allgather_object(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""

    @abstractmethod
    def allreduce(self, array: AnyArray, reduction: Reduction = "mean") -> AnyArray:
        """Reduce a small array element by element over all ranks, with the same bits on each."""

    @abstractmethod
    def group(self, size: int | None = None, what: str = SUMMING) -> Group:
        """This rank's group of ``size`` neighbouring ranks, or of all ranks without it. Collective over all ranks.

        ``size`` has to divide the ranks. The group ends with :meth:`recover`. ``what`` names its purpose in messages.
        """

    def kept_group(self, what: str) -> Group:
        """All ranks as a group for one purpose. Collective where it is formed: at first, and after ranks died."""
        if what not in self._kept_groups:
            self._kept_groups[what] = self.group(what=what)
        return self._kept_groups[what]

    def agreement(self) -> Group:
        """All ranks as a group in which they agree while they draw batches, maybe in another thread."""
        return self.kept_group("agreeing on the batches of a loader")

    def seconds_of_message(self, target: int, source: int, nbytes: int) -> float:
        """Seconds until a message from rank ``source`` is here, while one leaves for ``target``; both call this too."""
        raise NotImplementedError

    # The data plane.

    def torch(self) -> TorchEngine:
        """The engine that reduces PyTorch gradients. Collective at its first call."""
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} is for TensorFlow, but this is PyTorch",
            "choose --backend mpi or gloo",
            backend=self.backend,
        )

    @abstractmethod
    def tensorflow(self) -> TensorFlowEngine:
        """The engine that reduces TensorFlow gradients."""

    def process_group(self) -> None:
        """Make torch.distributed's default group of these ranks, unless it exists. Collective; idempotent.

        ``init_device_mesh`` and ``new_group`` work from then on. The group ends with :meth:`shutdown`.
        """
        self._process_group()
        # A script that asks for groups builds on them, so the hint about undistributed models is not due.
        self.distributed = True

    def _process_group(self) -> None:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} has no process groups of torch.distributed, which a model divided over ranks, DDP, "
            "FSDP and libraries built on them (Lightning, Accelerate) need",
            "choose --backend mpi, gloo or nccl",
            backend=self.backend,
        )

    def parameter_server(self, length: int) -> ParameterServer:
        """A vector of float32 that every rank reads and adds to without the others' help. Collective.

        Raises:
            HpctrainError: this backend has no parameter server.
        """
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} has no parameter server",
            "choose --backend mpi",
            backend=self.backend,
        )

    def before_shutdown(self, leave: Callable[[], None]) -> None:
        """Call a method, if its object is still alive, before an engine frees its memory."""
        self._leaving.append(weakref.WeakMethod(leave))

    def _leave_memory(self) -> None:
        for reference in self._leaving:
            if leave := reference():
                leave()
        self._leaving.clear()

    # The end of the work.

    def add_last_check(self, check: Callable[[], None]) -> None:
        """Call a method at the end of the run, if its object is alive on every rank. Call this on all ranks alike."""
        self._last_checks.append(weakref.WeakMethod(check))

    def keep(self, checked: object) -> None:
        """Keep an object of :meth:`add_last_check` alive until then."""
        self._kept.append(checked)

    def make_last_checks(self) -> None:
        """Make the last checks. Collective, before :meth:`shutdown`; idempotent."""
        self._leave_training()
        checks, self._last_checks = [reference() for reference in self._last_checks], []
        kept, self._kept = self._kept, []
        if self.size > 1 and checks:
            # Garbage collection may have removed an object on some ranks only.
            alive = self.allgather_object({number for number, check in enumerate(checks) if check is not None})
            for number in sorted(set[int].intersection(*alive)):
                if check := checks[number]:
                    check()
        kept.clear()

    def _leave_training(self) -> None:  # noqa: B027  # one process waits for nobody
        """Note that this rank has done its work, and only waits for the others to end."""

    def say(self, text: str) -> None:
        """Print a message for the user, once for all ranks."""
        if self.rank == 0:
            tell(f"hpctrain: {text}")

    # Ranks that die.

    @property
    def fault_tolerant(self) -> bool:
        """Whether the other ranks can go on when one dies: collectives then raise RanksLostError."""
        return False

    def lacks_for_fault_tolerance(self) -> str:
        """Why the run is not :attr:`fault_tolerant`."""
        return f"backend {self.backend!r} cannot"

    @property
    def lost(self) -> bool:
        """Whether ranks are known to have died since the run was formed or re-formed."""
        return False

    def agree(self) -> None:
        """A barrier that every rank passes. If a rank died before all had come, none does: all raise RanksLostError."""
        self.barrier()

    def broadcast_bytes(self, buffer: NDArray[np.uint8], root: int = 0) -> None:
        """Overwrite ``buffer`` with that of rank ``root``, in place. For fault-tolerant backends."""
        raise NotImplementedError

    def recover(self) -> tuple[LostRank, ...]:
        """Re-form a :attr:`fault_tolerant` run without the dead ranks. Collective over the remaining ranks.

        ``rank``, ``size``, ``local_rank`` and ``local_size`` change; the order of the ranks stays. An engine's buffers
        cannot be used any more. Returns the ranks that died, the same on every rank.

        Raises:
            RanksLostError: another one died meanwhile; call it again.
            HpctrainError: the remaining ranks cannot continue.
        """
        raise NotImplementedError

    @abstractmethod
    def shutdown(self) -> None:
        """Release threads and communicators; the object must not be used after that. Idempotent."""
