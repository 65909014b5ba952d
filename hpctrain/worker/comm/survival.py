"""Detects dead ranks and forms a communicator without them, with Open MPI's User-Level Failure Mitigation.

Calls that need a dead rank fail instead of waiting for it (Bland et al. 2013, https://doi.org/10.1177/1094342013488238;
https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hpctrain.worker.comm.base import RanksLostError
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# No message has this tag. Probing for one makes MPI notice processes that died.
_TAG = 1
# mpirun --with-ft tells its processes by this variable; without it, a dead process ends the job.
_SWITCH = "OMPI_MCA_mpi_ft_enable"


def missing_mitigation() -> str | None:
    """What this process's MPI lacks to continue without a dead rank; None if it lacks nothing."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    if not hasattr(MPI.Comm, "Shrink"):
        return f"it needs mpi4py 4 or later; this mpi4py has no MPI_Comm_shrink (MPI: {name})"
    try:
        MPI.COMM_SELF.Is_revoked()
        enabled = os.environ.get(_SWITCH, "").lower() in ("1", "true", "yes")
    except (NotImplementedError, MPI.Exception):
        enabled = False
    return None if enabled else f"it needs Open MPI 5, and mpirun --with-ft ulfm; this MPI is {name}"


def is_majority(hosts: Sequence[str], left: Sequence[str]) -> bool:
    """Whether the remaining ranks may continue, because no other part of the run can.

    Ranks of one host see each other die. But a host that fell silent may only be cut off, and take the others for dead
    as they do this one. So more hosts must remain than are gone, and of two halves neither continues.
    """
    return len(set(left)) > len(set(hosts) - set(left))


class Survival:
    """What this rank knows about the death of others.

    Attributes:
        comm: the ranks since the last :meth:`shrink`. No message on it has tag 1.
        members: their numbers at the start of the run, and their hosts, in rank order.
    """

    def __init__(self, comm: MPI.Intracomm, members: Sequence[tuple[int, str]]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.members = list(members)
        self._deaths = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        # Whether an agreement of these ranks has failed, on all of them.
        self._given_up = False
        self._recovering: int | None = None

    @property
    def lost(self) -> bool:
        """Whether a rank is known to have died. Costs about a microsecond."""
        try:
            self.comm.Iprobe(self._mpi.ANY_SOURCE, _TAG)
            return self.comm.Is_revoked() or bool(self._failed())
        except self._mpi.Exception as error:
            if error.Get_error_class() in self._deaths:
                return True
            raise

    def check(self) -> None:
        """Raise RanksLostError if a rank is known to have died, and in other threads until the ranks have re-formed."""
        others_turn = self._recovering is not None and self._recovering != threading.get_ident()
        if others_turn or self.lost:
            raise self._error()

    def explain(self, error: BaseException) -> None:
        """Raise RanksLostError if ``error`` is MPI's error for a dead rank; else return."""
        if isinstance(error, self._mpi.Exception) and error.Get_error_class() in self._deaths:
            raise self._error() from error

    def begin(self) -> None:
        """Begin to re-form the run in this thread: until :meth:`end`, waits of other threads fail."""
        self._recovering = threading.get_ident()

    def end(self) -> None:
        self._recovering = None

    def give_up(self, timeout: Timeout) -> None:
        """Make every remaining rank call :meth:`shrink` next, whether it is in a wait or in :meth:`agree`.

        Open MPI's Shrink begins with agreements of its own, which are identified by their number on the communicator
        (Herault et al. 2015, https://doi.org/10.1145/2807591.2807665): a shrinking rank would take part in the
        agreement that another rank is in. So a rank first votes against that agreement, which ends it on all ranks.
        """
        self.comm.Revoke()
        if not self._given_up:
            self._vote(0, timeout, "agreeing to continue without the ranks that died")

    def shrink(self) -> None:
        """Replace :attr:`comm` by one of the remaining ranks. Collective over these, each after :meth:`give_up`."""
        before = self.comm
        # Open MPI 5.0.11 ends its non-blocking form with an internal error.
        fresh = before.Shrink()
        old, new = before.Get_group(), fresh.Get_group()
        translated = self._mpi.Group.Translate_ranks(old, None, new)
        old.Free()
        new.Free()
        here = [rank != self._mpi.UNDEFINED for rank in translated]
        self.members = list(itertools.compress(self.members, here))
        self.comm, self._given_up = cast("MPI.Intracomm", fresh), False

    def agree(self, timeout: Timeout) -> None:
        """A barrier that all ranks pass, or none.

        Raises:
            RanksLostError: a rank died; raised on every remaining rank.
            HpctrainError: a live rank does not come in time.
        """
        if not self._vote(1, timeout, "agreeing on what is done"):
            raise self._error()

    def _vote(self, own: int, timeout: Timeout, what: str) -> bool:
        """Whether every rank votes 1 and none died; the same on all of them."""
        votes = np.full(1, own, dtype=np.intc)
        try:
            timeout.finish(lambda: self.comm.Iagree(votes), what, check_deaths=False)
            self._given_up = not votes[0]
        except RanksLostError:
            self._given_up = True
        return not self._given_up

    def _failed(self) -> list[int]:
        failed = self.comm.Get_failed()
        try:
            if not failed.size:
                return []
            own = self.comm.Get_group()
            ranks = self._mpi.Group.Translate_ranks(failed, None, own)
            own.Free()
            return [int(rank) for rank in ranks]
        finally:
            failed.Free()

    def _error(self) -> RanksLostError:
        try:
            ranks = self._failed()
        except self._mpi.Exception:
            ranks = []
        names = ", ".join(f"rank {self.members[rank][0]} on {self.members[rank][1]}" for rank in ranks)
        return RanksLostError("HT-rank-died", "{ranks} died", ranks=names or "a rank")
