"""Communicators: who takes part in a run, and how gradients and small facts travel between the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import TracebackType

import numpy as np

from hpctrain.common.cluster.backends import BACKENDS
from hpctrain.common.cluster.launcher import detect
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.run import stopping
from hpctrain.common.settings import BACKEND, RANKS_ALONE
from hpctrain.common.stderr import tell, tell_error
from hpctrain.worker.comm import forgotten, forks
from hpctrain.worker.comm.base import Communicator, RanksLostError
from hpctrain.worker.comm.connecting import connect, require_own_place
from hpctrain.worker.comm.forgotten import forgotten_calls, others_imported
from hpctrain.worker.comm.graph_errors import original_error
from hpctrain.worker.comm.rank_run import end_job, run

__all__ = ["Communicator", "current", "init", "should_stop", "shutdown"]

# What MPI_Finalize and the remaining exit handlers of a fault-tolerant run may take together.
_FINALIZE_SECONDS = 20


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
        HpctrainError: a backend that is unknown, not installed or not for this launcher, or an MPI that is not.
    """
    if run.comm is None:
        wanted = backend or BACKEND.read()
        if wanted not in BACKENDS:
            raise HpctrainError(
                "HT-choice-unknown", "unknown backend {backend!r}", nearest(wanted, BACKENDS), backend=wanted
            )
        forks.require_rank("ht.init()")
        launcher = detect()
        if launcher and launcher.size > 1:
            require_own_place(launcher)
            forks.watch()
            # Installed before connecting: a fault-tolerant MPI does not abort the others when this rank fails.
            _abort_on_exception()
        if not run.joined:
            # Asked before hpctrain itself imports some of them.
            run.distributed = run.knows_others = others_imported()
        comm = run.comm = connect(wanted, launcher)
        run.joined = True
        watch()
        run.leave_at_exit(_leave)
        if comm.rank == 0:
            ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
            threads = os.environ.get("OMP_NUM_THREADS")
            each = f", {threads} thread{'s' * (threads != '1')} each" if threads else ""
            tell(f"hpctrain: {ranks}, backend {comm.backend} ({comm.reason}){each}")
    return run.comm


def current() -> Communicator:
    """The communicator of this process; joins the run if that has not happened yet."""
    return run.comm or init()


def should_stop() -> bool:
    """Whether the run should stop because a signal or ``RUN_DIR/stop`` asked any of the ranks to.

    Collective, with the cost of a small reduction: all ranks call it at the same place, once a step or an epoch, and
    all get the same answer. A script that gets True saves its state and ends with ``sys.exit(ht.RESUMABLE)`` on all
    ranks, after which ``hpctrain run --resume`` starts it again. From the first call on, SIGTERM asks for a stop too,
    and so does any signal to ``hpctrain run`` that would end it.
    """
    comm = current()
    stopping.this_process.listen("TERM")
    own = stopping.this_process.asked(look=comm.rank == 0) is not None
    stop = bool(comm.allreduce(np.array([float(own)]), "max")[0])
    if stop:
        stopping.this_process.agree()
    return stop


def shutdown() -> None:
    """Leave the run, after a last proof that the ranks hold equal parameters. Runs by itself at interpreter exit.

    Idempotent; does nothing in a fork of a rank, nor while an error is handled, as in a ``finally`` block that it has
    entered: other ranks may wait where this one failed, and its error could never end the run.
    """
    if sys.exception() is None:
        _leave_run()


def _leave_run() -> None:
    if forks.is_fork():
        return
    try:
        make_last_checks()
    finally:
        leaving = run.end()
        try:
            if leaving is not None:
                leaving.left = True
                leaving.shutdown()
        finally:
            if run.replaced_hook is not None:
                sys.excepthook, run.replaced_hook = run.replaced_hook, None


def make_last_checks() -> None:
    """Make the last checks while an error can still be reported. Collective; idempotent."""
    if run.comm is not None:
        run.distributed |= run.comm.trains_together()
        # After a rank's death there is nothing left to compare, and the others have finished their work.
        with contextlib.suppress(RanksLostError):
            run.comm.make_last_checks()


def leave_errors_to_caller() -> None:
    """Leave an uncaught exception of the script to the caller, who explains it, and ends every rank afterwards."""
    run.ends_ranks = True


def watch() -> None:
    """Note from now on whether a user's script trains, so that it can be told what it has forgotten. Idempotent."""
    forgotten.watch()


def _forgotten(ranks: int) -> str | None:
    """What a user's script has forgotten, whose ranks each trained alone."""
    # What it asks of other libraries may fail in any state of theirs, which must not fail the run.
    with contextlib.suppress(Exception):
        run.distributed |= run.comm is not None and run.comm.trains_together()
        return forgotten_calls(ranks, joined=run.joined, distributed=run.distributed)
    return None


def require_distributed(ranks: int) -> None:
    """At the end of a user's script, refuse a result of ranks that each trained alone."""
    if problem := _forgotten(ranks):
        raise HpctrainError(
            "HT-ranks-trained-alone",
            "{problem}",
            f"{RANKS_ALONE.name}=1 hpctrain run … says that this is meant, or that they join in a way of their own",
            exit_code=1,
            problem=problem,
        )


def _leave() -> None:
    """Leave the run at the interpreter's exit, which after a rank's death may not end by itself.

    Open MPI 5.0's MPI_Finalize may wait for dead ranks for ever (https://github.com/open-mpi/ompi/issues/11404). Python
    runs neither threads nor signal handlers by then, so the default action of SIGALRM ends the process.
    """
    fault_tolerant = run.comm is not None and run.comm.fault_tolerant
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
    if run.comm is not None and run.comm.rank == 0 and (problem := _forgotten(run.comm.size)):
        tell(f"hpctrain: {problem}")
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
    forks.flush_streams()


def _abort_on_exception() -> None:
    """Make an uncaught exception end every rank: the others would wait for this one forever."""
    if run.replaced_hook is not None or run.ends_ranks:
        return
    show = run.replaced_hook = sys.excepthook

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if forks.is_fork():
            return
        _abort(_exit_code(original_error(error)))

    sys.excepthook = report_and_abort


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HpctrainError) else 1


def _abort(exit_code: int) -> None:
    if (run.comm is not None and run.comm.size > 1) or "mpi4py.MPI" in sys.modules:
        # The process ends without exit handlers, which would have flushed these.
        forks.flush_streams()
        end_job(exit_code)
    # Ranks of torchrun, and those that have not loaded MPI yet, return: their launcher acts on the exit status.
