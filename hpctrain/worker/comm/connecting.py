"""Connects this process to the ranks of its run: chooses the backend, and refuses what cannot become one run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from hpctrain.common.cluster.gpus import fitting_backend, only_gpu, see_one_each, usable_gpus
from hpctrain.common.cluster.launcher import SRUN_NONE, TORCHRUN, TORCHRUN_MARK, LauncherClaim, detect
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.files.printable import shell_word
from hpctrain.common.settings import BACKEND, BACKEND_REASON, TIMEOUT
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.single import SingleCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

# Added to the launcher's own limit, so that the launcher, which can start the ranks again, reports first.
_MARGIN_SECONDS = 10


def require_own_place(claim: LauncherClaim) -> None:
    """Refuse a process that multiprocessing started from a rank, and that has that rank's place in its environment."""
    process = sys.modules.get("multiprocessing.process")
    parent = process and process.parent_process()
    # While it imports the script, before it knows its parent.
    begins = process and getattr(process.current_process(), "_inheriting", False)
    # Under srun without an MPI a rank has set torchrun's variables itself; it began without them.
    renamed = os.environ.get(TORCHRUN_MARK, "").startswith(SRUN_NONE)
    with contextlib.suppress(psutil.Error):
        started = detect(psutil.Process(parent.pid).environ()) if parent else None
        if started and renamed:
            started = replace(started, name=claim.name, variable=claim.variable)
        if begins or started == claim:
            raise HpctrainError(
                "HT-call-in-child-process",
                "ht.init() was called in process {pid}, which multiprocessing has started from rank "
                "{rank} and is none itself",
                'such a process imports the script anew: keep what ranks do under `if __name__ == "__main__":`',
                pid=os.getpid(),
                rank=claim.rank,
            )


def connect(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    """The communicator of the backend, a name of hpctrain.common.cluster.backends.BACKENDS. Collective."""
    ranks = launcher.size if launcher else 1
    if wanted in ("single", "mirrored") or (wanted == "auto" and ranks == 1):
        if launcher and ranks > 1:
            raise HpctrainError(
                "HT-backend-unfit",
                "backend {backend!r} is for one process, but {launcher} started {ranks} ({variable}={ranks})",
                "choose --backend auto, or start one process",
                backend=wanted,
                launcher=launcher.name,
                ranks=ranks,
                variable=launcher.variable,
            )
        if wanted == "mirrored":
            from hpctrain.worker.comm.tf_distribute import MirroredCommunicator

            return MirroredCommunicator(_reason(wanted))
        return SingleCommunicator(_reason(wanted) if wanted == "single" else "no launcher started further ranks")
    if launcher and launcher.name == TORCHRUN:
        return _connect_torchrun(wanted, launcher)
    return _connect_mpi(wanted, launcher)


def _reason(wanted: str) -> str:
    """Why the launcher or the user chose this backend; the launcher's reason is in an environment variable."""
    launched = os.environ.get(BACKEND.name) == wanted
    return (BACKEND_REASON.read() if launched else None) or "asked for"


def _connect_torchrun(wanted: str, launcher: LauncherClaim) -> Communicator:
    if wanted not in ("auto", "gloo", "nccl"):
        again = f"hpctrain run {shell_word(sys.argv[0])} -np {launcher.size} --backend {wanted}"
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} needs ranks started by MPI, but these {ranks} were started without",
            f"choose gloo or nccl, or start it with: {again}",
            backend=wanted,
            ranks=launcher.size,
        )
    reason = _reason(wanted)
    if wanted == "auto":
        # All hosts must choose the same backend before they can communicate, so they are assumed to be alike.
        wanted, why = _fitting("torch", int(os.environ["LOCAL_WORLD_SIZE"]))
        wanted, reason = {"mpi": "gloo"}.get(wanted, wanted), f"torchrun, {why}"
    return _torch_distributed(wanted, reason, None)


def _torch_distributed(backend: str, reason: str, world: MPI.Intracomm | None) -> Communicator:
    try:
        from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator
    except ImportError as error:
        raise HpctrainError(
            "HT-backend-unavailable",
            "backend {backend!r} needs PyTorch, which cannot be loaded: {reason}",
            "pip install 'hpctrain[torch]'",
            backend=backend,
            reason=str(error),
        ) from error
    return TorchDistributedCommunicator("nccl" if backend == "nccl" else "gloo", reason, world)


def _connect_mpi(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    world = mpi_world(launcher)
    backend, reason = _automatic(world) if wanted == "auto" else (wanted, _reason(wanted))
    if backend == "mpi":
        from hpctrain.worker.comm.mpi import MpiCommunicator

        return MpiCommunicator(world, reason)
    if backend == "horovod":
        from hpctrain.worker.comm.horovod import HorovodCommunicator
        from hpctrain.worker.comm.rank_gpus import gpu_number

        comm = HorovodCommunicator(world, reason)
        # What "cuda" means to a script; the imports so far are the only sign of its framework.
        torch = sys.modules.get("torch")
        if torch and "tensorflow" not in sys.modules and (own := gpu_number(comm, required=False)) is not None:
            torch.cuda.set_device(own)
        return comm
    if backend in ("multi_worker", "parameter_server"):
        return _connect_tensorflow(backend, reason, world, launcher)
    return _torch_distributed(backend, reason, world)


def _connect_tensorflow(
    backend: str, reason: str, world: MPI.Intracomm, launcher: LauncherClaim | None
) -> Communicator:
    # TensorFlow's servers wait for each other in C++, as MPI does.
    with _limited_start(launcher):
        if backend == "multi_worker":
            from hpctrain.worker.comm.tf_distribute import MultiWorkerCommunicator

            return MultiWorkerCommunicator(world, reason)
        from hpctrain.worker.comm.tf_distribute import ParameterServerCommunicator

        comm = ParameterServerCommunicator(world, reason)
    if comm.rank > 0:
        comm.serve()
        sys.exit()
    return comm


def mpi_world(launcher: LauncherClaim | None) -> MPI.Intracomm:
    """All ranks that MPI started, as the launcher says too."""
    try:
        with _limited_start(launcher):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
            raise missing from error
        raise HpctrainError(
            "HT-mpi-unavailable",
            "MPI cannot be loaded: {reason}",
            "put a cluster's MPI on the PATH and LD_LIBRARY_PATH, or: pip install 'hpctrain[mpi]'",
            reason=str(error),
        ) from error
    world = MPI.COMM_WORLD
    if launcher and world.Get_size() != launcher.size:
        vendor, version = MPI.get_vendor()
        raise HpctrainError(
            "HT-mpi-other-than-launcher",
            "{launcher} started {ranks} ranks ({variable}={ranks}), but the MPI in this process, {mpi} "
            "{version}, sees {seen}: the launcher and the MPI library do not match, so every rank would "
            "train alone",
            "start with the mpirun of that MPI, or `srun --mpi=pmix`; `hpctrain horovod check` names both; "
            "--launcher srun-none needs no MPI, with --backend gloo or nccl",
            launcher=launcher.name,
            ranks=launcher.size,
            variable=launcher.variable,
            mpi=vendor,
            version=".".join(map(str, version)),
            seen=world.Get_size(),
        )
    return world


@contextlib.contextmanager
def _limited_start(launcher: LauncherClaim | None) -> Iterator[None]:
    """End this process if MPI does not start in time.

    MPI waits in C, where no Python exception can be raised, for ranks on hosts that cannot be reached.
    """
    if launcher is None or launcher.size == 1:
        yield
        return
    faulthandler.dump_traceback_later(TIMEOUT.read() + _MARGIN_SECONDS, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _automatic(world: MPI.Intracomm) -> tuple[str, str]:
    """The backend for ranks that were started by hand, and why; the same on all ranks."""
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    # The imports so far are the only sign of the framework that the script uses.
    torch = "torch" in sys.modules and "tensorflow" not in sys.modules
    apart = see_one_each(node.allgather(only_gpu())) and torch
    own = _fitting("torch" if torch else None, 1 if apart else node.size)
    node.Free()
    # One host with too few GPUs decides for all; otherwise the answers differ in the host's name only.
    found: list[tuple[str, str]] = world.allgather(own)
    return next((choice for choice in found if choice[0] == "mpi"), found[0])


def _fitting(framework: str | None, local_ranks: int) -> tuple[str, str]:
    """The backend for the ranks of this host, and why. For PyTorch only the GPUs that it can use itself count."""
    if framework is None:
        gpus = usable_gpus()
    else:
        try:
            import torch

            gpus = torch.cuda.device_count()
        except ImportError:
            gpus = 0
    return fitting_backend(framework, gpus, local_ranks, socket.gethostname())
