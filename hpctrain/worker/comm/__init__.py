"""Communicators: who takes part in a run, and how gradients and small facts travel between the ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import psutil

from hpctrain.common.cluster.backends import BACKENDS
from hpctrain.common.cluster.gpus import fitting_backend, usable_gpus
from hpctrain.common.cluster.launcher import TORCHRUN, LauncherClaim, detect
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.extras import missing_extra
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run import stopping
from hpctrain.common.settings import BACKEND, BACKEND_REASON, RANKS_ALONE, TIMEOUT
from hpctrain.common.stderr import tell, tell_error
from hpctrain.worker.comm import forgotten, forks
from hpctrain.worker.comm.base import Communicator, RanksLostError
from hpctrain.worker.comm.exit_handler import leave_at_exit
from hpctrain.worker.comm.forgotten import Forgotten, forgotten_calls, ignore_import, others_imported
from hpctrain.worker.comm.graph_errors import original_error
from hpctrain.worker.comm.single import SingleCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "current", "init", "should_stop", "shutdown"]

# What MPI_Finalize and the remaining exit handlers of a fault-tolerant run may take together.
_FINALIZE_SECONDS = 20
# Added to the launcher's own limit, so that the launcher, which can start the ranks again, reports first.
_MARGIN_SECONDS = 10

_current: Communicator | None = None
# Whether this process has ever joined a run, and whether it has trained with the other ranks of one.
_joined = _distributed = False
# Whether the script has imported a library by which ranks train together without hpctrain.
_knows_others = False
# Whether the user was told that each rank trains alone.
_mentioned = False
# Whether the program that runs this script ends every rank where one raises an exception.
_ends_ranks = False
# The exception hook that init() replaced.
_show: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def init(backend: str | None = None) -> Communicator:
    """Join the run that the launcher started, and print on rank 0 which backend was chosen and why.

    Args:
        backend: one of :data:`hpctrain.common.cluster.backends.BACKENDS`. By default the one that ``hpctrain run``
            chose, through the variable ``HPCTRAIN_BACKEND``, or else ``auto``: ``single`` for one process; where each
            rank has a GPU, ``nccl`` if the script has imported PyTorch and not TensorFlow, otherwise ``horovod``;
            ``mpi`` in all other cases. Among ranks of torchrun, ``nccl`` or ``gloo``.

    Returns:
        The communicator; a second call returns the same one. ``rank``, ``size``, ``local_rank``, ``local_size`` and
        ``host`` say which process this is. All ranks call these methods at the same place, and all get the same result:
        ``barrier()``; ``broadcast_object(value)``, rank 0's value; ``allgather_object(value)``, a list with one value
        from each rank; ``allreduce(array, "mean")`` of a small NumPy array, or ``"sum"``, ``"min"``, ``"max"``. For
        samples and metrics use :func:`hpctrain.gather` and :func:`hpctrain.mean`::

            comm = ht.init()
            seed = comm.broadcast_object(random.randrange(2**32))
            seen = comm.allreduce(np.array([own_samples]), "sum")[0]
            if comm.rank == 0:
                save(model)  # not collective: nothing that all ranks have to call
            comm.barrier()

    Raises:
        SystemExit: at the end of training, on the ranks of ``parameter_server`` that serve rank 0.
        HpctrainError: an unknown backend, one that is not installed or not for this launcher, or a launcher and an
            MPI that do not match.
    """
    global _current, _joined, _distributed, _knows_others
    if _current is None:
        wanted = backend or BACKEND.read()
        if wanted not in BACKENDS:
            raise HpctrainError(
                "HT-backend-unknown", "unknown backend {backend!r}", nearest(wanted, BACKENDS), backend=wanted
            )
        forks.require_rank("ht.init()")
        launcher = detect()
        if launcher and launcher.size > 1:
            _require_own_place(launcher)
            forks.watch()
            # Installed before connecting: a fault-tolerant MPI does not abort the others when this rank fails.
            _abort_on_exception()
        if not _joined:
            # Asked before hpctrain itself imports some of them.
            _distributed = _knows_others = others_imported()
        _current = _connect(wanted, launcher)
        _joined = True
        watch()
        leave_at_exit(_leave)
        if _current.rank == 0:
            ranks = "1 rank" if _current.size == 1 else f"{_current.size} ranks"
            threads = os.environ.get("OMP_NUM_THREADS")
            each = f", {threads} thread{'s' * (threads != '1')} each" if threads else ""
            tell(f"hpctrain: {ranks}, backend {_current.backend} ({_current.reason}){each}")
    return _current


def current() -> Communicator:
    """The communicator of this process; joins the run if that has not happened yet."""
    return _current or init()


def should_stop() -> bool:
    """Whether the run should stop because a signal or ``RUN_DIR/stop`` asked any of the ranks to.

    Collective, with the cost of a small reduction: all ranks call it at the same place, once a step or an epoch, and
    all get the same answer. A script that gets True saves its state and ends with ``sys.exit(ht.RESUMABLE)`` on all
    ranks, after which ``hpctrain run --resume`` starts it again. An elastic run asks for a stop when its hosts change,
    and starts the script again by itself. From the first call on, SIGTERM asks for a stop too, and so does any signal
    to ``hpctrain run`` that would end it.
    """
    comm = current()
    stopping.listen("TERM")
    own = stopping.asked(look=comm.rank == 0) is not None
    stop = bool(comm.allreduce(np.array([float(own)]), "max")[0])
    if stop:
        stopping.agree()
    return stop


def name_tensorflow_workers() -> None:
    """Write ``TF_CONFIG`` for a script that makes a MultiWorkerMirroredStrategy by itself. Collective."""
    from hpctrain.worker.comm.tf_config import name_workers

    world = _mpi_world(detect())
    # It was not the script that imported it.
    ignore_import("mpi4py.MPI")
    name_workers(world)


def shutdown() -> None:
    """Leave the run, after a last proof that the ranks hold equal parameters. Runs by itself at interpreter exit.

    Idempotent; does nothing in a fork of a rank, nor while an error is handled, as in a ``finally`` block that it has
    entered: other ranks may wait where this one failed, and its error could never end the run.

    Raises:
        HpctrainError: the ranks do not hold equal parameters.
    """
    if sys.exception() is None:
        _leave_run()


def _leave_run() -> None:
    global _current
    if forks.is_fork():
        return
    try:
        make_last_checks()
    finally:
        leaving, _current = _current, None
        try:
            if leaving is not None:
                leaving.left = True
                leaving.shutdown()
        finally:
            _show_again()


def make_last_checks() -> None:
    """Make the last checks while an error can still be reported. Collective; idempotent.

    Raises:
        HpctrainError: a check failed.
    """
    global _distributed
    if _current is not None:
        _distributed |= _current.trains_together()
        # After a rank's death there is nothing left to compare, and the others have finished their work.
        with contextlib.suppress(RanksLostError):
            _current.make_last_checks()


def knows_others() -> bool:
    """Whether the script had imported a library by which ranks train together when it joined the run."""
    return _knows_others


def leave_errors_to_caller() -> None:
    """Leave an uncaught exception of the script to the caller, who explains it, and ends every rank afterwards."""
    global _ends_ranks
    _ends_ranks = True


def watch() -> None:
    """Note from now on whether a user's script trains, so that it can be told what it has forgotten. Idempotent.

    Raises:
        HpctrainError: ``HPCTRAIN_RANKS_ALONE`` is neither 1 nor 0.
    """
    if not RANKS_ALONE.read():
        forgotten.watch()


def mention_forgotten(rank: int, ranks: int) -> Forgotten | None:
    """Say on rank 0, once, that each rank of a user's script trained alone; returns what was said."""
    global _distributed, _mentioned
    # What it asks of other libraries may fail in any state of theirs. A mere hint must not fail the run.
    with contextlib.suppress(Exception):
        _distributed |= _current is not None and _current.trains_together()
        found = forgotten_calls(ranks, joined=_joined, distributed=_distributed)
        if found and rank == 0 and not _mentioned:
            _mentioned = True
            tell(f"hpctrain: {found.text}")
        return found
    return None


def require_distributed(rank: int, ranks: int) -> None:
    """At the end of a user's script, refuse a result of ranks that each trained alone.

    Raises:
        HpctrainError: every rank trained a model of its own.
    """
    found = mention_forgotten(rank, ranks)
    if found and found.alone:
        raise HpctrainError(
            "HT-ranks-trained-alone",
            "{problem}",
            f"{RANKS_ALONE.name}=1 hpctrain run … says that this is meant, or that they join in a way of their own",
            exit_code=1,
            problem=found.text,
        )


def _show_again() -> None:
    global _show
    if _show is not None:
        sys.excepthook, _show = _show, None


def _leave() -> None:
    """Leave the run at the interpreter's exit, which after a rank's death may not end by itself.

    Open MPI 5.0's MPI_Finalize may wait for dead ranks for ever (https://github.com/open-mpi/ompi/issues/11404). Python
    runs neither threads nor signal handlers by then, so the default action of SIGALRM ends the process.
    """
    fault_tolerant = _current is not None and _current.fault_tolerant
    try:
        make_last_checks()
    except BaseException as raised:
        # Python ignores exceptions of exit handlers in the exit status, and the other ranks would wait for this one.
        error = original_error(raised)
        if isinstance(error, HpctrainError):
            tell(f"hpctrain: {error}")
        else:
            tell_error(error)
        try:
            _abort(_exit_code(error))
        finally:
            os._exit(_exit_code(error))
    if _current is not None:
        mention_forgotten(_current.rank, _current.size)
    _leave_run()
    if fault_tolerant:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZE_SECONDS)


def leave_now() -> None:
    """Leave the run, and the libraries that carried it, in a process that ends without exit handlers."""
    _leave()
    for name in ("horovod.torch", "horovod.tensorflow"):
        if horovod := sys.modules.get(name):
            horovod.shutdown()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        # Open MPI's launcher ends the other ranks of one that leaves without this.
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _require_own_place(claim: LauncherClaim) -> None:
    """Refuse a process that multiprocessing started from a rank, and that has that rank's place in its environment.

    Raises:
        HpctrainError: multiprocessing started this process from a rank.
    """
    process = sys.modules.get("multiprocessing.process")
    parent = process and process.parent_process()
    # While it imports the script, before it knows its parent.
    begins = process and getattr(process.current_process(), "_inheriting", False)
    with contextlib.suppress(psutil.Error):
        if begins or (parent and detect(psutil.Process(parent.pid).environ()) == claim):
            raise HpctrainError(
                "HT-init-in-child-process",
                "ht.init() was called in process {pid}, which multiprocessing has started from rank "
                "{rank} and is none itself",
                'such a process imports the script anew: keep what ranks do under `if __name__ == "__main__":`',
                pid=os.getpid(),
                rank=claim.rank,
            )


def _abort_on_exception() -> None:
    """Make an uncaught exception end every rank: the others would wait for this one forever."""
    global _show
    if _show is not None or _ends_ranks:
        return
    show = _show = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if forks.is_fork():
            return
        if (said := explained(error)) is not error and isinstance(said, HpctrainError):
            tell(f"hpctrain: {said}")
        _abort(_exit_code(said))

    sys.excepthook = report_and_abort


def explained(error: BaseException) -> BaseException:
    """The error that ends this rank, as it was raised first, and in hpctrain's words where a library's say less."""
    found = original_error(error)
    return found if _current is None or forks.is_fork() else _current.explained(found)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HpctrainError) else 1


def _abort(exit_code: int) -> None:
    # The process ends without exit handlers, which would have flushed these.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _current is not None:
        _current.abort(exit_code)
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(exit_code)
    # Ranks of torchrun, and those that have not loaded MPI yet, return: their launcher acts on the exit status.


def _connect(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    ranks = launcher.size if launcher else 1
    if wanted in ("single", "mirrored") or (wanted == "auto" and ranks == 1):
        if launcher and ranks > 1:
            raise HpctrainError(
                "HT-backend-for-one-process",
                "backend {backend!r} is for one process, but {launcher} started {ranks} ({variable}={ranks})",
                "choose --backend auto, or start one process",
                backend=wanted,
                launcher=launcher.name,
                ranks=ranks,
                variable=launcher.variable,
            )
        if wanted == "mirrored":
            from hpctrain.worker.comm.mirrored import MirroredCommunicator

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
            "HT-backend-needs-mpi",
            "backend {backend!r} needs ranks started by MPI, but torchrun started these {ranks}",
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
            "HT-backend-no-torch",
            "backend {backend!r} needs PyTorch, which cannot be loaded: {reason}",
            "pip install 'hpctrain[torch]'",
            backend=backend,
            reason=str(error),
        ) from error
    return TorchDistributedCommunicator("nccl" if backend == "nccl" else "gloo", reason, world)


def _connect_mpi(wanted: str, launcher: LauncherClaim | None) -> Communicator:
    world = _mpi_world(launcher)
    backend, reason = _automatic(world) if wanted == "auto" else (wanted, _reason(wanted))
    if backend == "mpi":
        from hpctrain.worker.comm.mpi_engine import MpiCommunicator

        return MpiCommunicator(world, reason)
    if backend == "horovod":
        from hpctrain.worker.comm.horovod import HorovodCommunicator

        return HorovodCommunicator(world, reason)
    if backend in ("multi_worker", "parameter_server"):
        return _connect_tensorflow(backend, reason, world, launcher)
    return _torch_distributed(backend, reason, world)


def _connect_tensorflow(
    backend: str, reason: str, world: MPI.Intracomm, launcher: LauncherClaim | None
) -> Communicator:
    # TensorFlow's servers wait for each other in C++, as MPI does.
    with _limited_start(launcher):
        if backend == "multi_worker":
            from hpctrain.worker.comm.multi_worker import MultiWorkerCommunicator

            return MultiWorkerCommunicator(world, reason)
        from hpctrain.worker.comm.tf_parameter_server import ParameterServerCommunicator

        comm = ParameterServerCommunicator(world, reason)
    if comm.rank > 0:
        comm.serve()
        sys.exit()
    return comm


def _mpi_world(launcher: LauncherClaim | None) -> MPI.Intracomm:
    try:
        with _limited_start(launcher):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
            raise missing from error
        raise HpctrainError(
            "HT-mpi-not-loadable",
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
            "start with the mpirun of that MPI, or `srun --mpi=pmix`; `hpctrain horovod check` names both",
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
    own = _fitting("torch" if torch else None, node.size)
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
