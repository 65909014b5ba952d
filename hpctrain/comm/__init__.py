"""Communicators: who takes part in a run, and how gradients and small facts travel between the ranks."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

import numpy as np

from hpctrain import stopping
from hpctrain.cluster.launcher import LauncherClaim, detect
from hpctrain.comm.base import Communicator
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import HpctrainError, nearest
from hpctrain.plan import BACKENDS

__all__ = ["Communicator", "current", "init", "should_stop", "shutdown"]

_current: Communicator | None = None


def init(backend: str | None = None) -> Communicator:
    """Join the run that the launcher started, and say once on rank 0 what was chosen and why.

    Args:
        backend: ``auto``, ``horovod`` or ``single``. By default what ``hpctrain run --backend`` said, through
            the variable ``HPCTRAIN_BACKEND``, else ``auto``: Horovod where a launcher started several ranks.

    Returns:
        The communicator; a second call returns the same one.

    Raises:
        HpctrainError: an unknown backend, Horovod not built, or a launcher and an MPI that do not match.
    """
    global _current
    if _current is None:
        wanted = backend or os.environ.get("HPCTRAIN_BACKEND", "auto")
        if wanted not in BACKENDS:
            raise HpctrainError(f"unknown backend {wanted!r}", nearest(wanted, BACKENDS))
        _current = _connect(wanted, detect())
        atexit.register(shutdown)
        if _current.size > 1:
            _abort_on_exception(_current)
        if _current.rank == 0:
            ranks = "1 rank" if _current.size == 1 else f"{_current.size} ranks"
            print(f"hpctrain: {ranks}, backend {_current.backend} ({_current.reason})", file=sys.stderr)
    return _current


def current() -> Communicator:
    """The communicator of this process; joins the run if nobody did yet."""
    return _current or init()


def should_stop() -> bool:
    """Whether the run is to stop: a signal or ``RUN_DIR/stop`` asked any of the ranks for it.

    Collective, with the cost of a small reduction: all ranks call it at the same place, once a step or an epoch, and
    all get the same answer. A script that gets True saves its state and ends with ``sys.exit(ht.RESUMABLE)`` on all
    ranks, after which ``hpctrain run --resume`` starts it again. From the first call on,
    SIGTERM asks for a stop too, and so does any signal to ``hpctrain run`` that would end it.
    """
    comm = current()
    stopping.listen("TERM")
    own = stopping.asked(look=comm.rank == 0) is not None
    stop = bool(comm.allreduce(np.array([float(own)]), "max")[0])
    if stop:
        stopping.agree()
    return stop


def shutdown() -> None:
    """Leave the run. Runs by itself at interpreter exit; idempotent."""
    global _current
    if _current is not None:
        _current.shutdown()
        _current = None


def _abort_on_exception(comm: Communicator) -> None:
    """Let an exception that nobody caught end every rank: the others would wait for this one for ever."""
    show = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        sys.stderr.flush()
        comm.abort(error.exit_code if isinstance(error, HpctrainError) else 1)

    sys.excepthook = report_and_abort


def _connect(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    ranks = launcher.size if launcher else 1
    if wanted == "single" or (wanted == "auto" and ranks == 1):
        if launcher and ranks > 1:
            raise HpctrainError(
                f"backend 'single' is for one process, but {launcher.name} started {ranks} "
                f"({launcher.variable}={ranks})",
                "choose --backend horovod, or start one process",
            )
        return SingleCommunicator("asked for" if wanted == "single" else "no launcher started further ranks")
    return _connect_mpi(wanted, launcher)


def _connect_mpi(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HpctrainError(
            f"MPI cannot be loaded: {error}",
            "put a cluster's MPI on the PATH and LD_LIBRARY_PATH, or: pip install 'hpctrain[mpi]'",
        ) from error
    world = MPI.COMM_WORLD
    if launcher and world.Get_size() != launcher.size:
        vendor, version = MPI.get_vendor()
        raise HpctrainError(
            f"{launcher.name} started {launcher.size} ranks ({launcher.variable}={launcher.size}), but the MPI in "
            f"this process, {vendor} {'.'.join(map(str, version))}, sees {world.Get_size()}: the launcher and the "
            "MPI library do not match, so every rank would train alone",
            "start with the mpirun of that MPI, or `srun --mpi=pmix`; `hpctrain horovod check` names both",
        )
    if wanted == "mpi":
        from hpctrain.comm.mpi_engine import MpiCommunicator

        return MpiCommunicator(world, "asked for")
    from hpctrain.comm.horovod import HorovodCommunicator

    reason = "asked for" if wanted == "horovod" else f"{launcher.name} started it" if launcher else "default"
    return HorovodCommunicator(world, reason)
