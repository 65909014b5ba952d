"""Detects dead ranks and forms a communicator without them, with Open MPI's ULFM.

User-Level Failure Mitigation (Bland et al. 2013, https://doi.org/10.1177/1094342013488238; its functions are in
https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html): calls that need a dead rank fail instead of waiting for it, and
the programs decide what to do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hpctrain.worker.comm.base import LostRank, RanksLostError
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# Nobody sends a message with it: looking for one lets MPI find out what happened to its processes.
_TAG = 1
# mpirun --with-ft tells its processes by this variable; without it, a dead process ends the job.
_SWITCH = "OMPI_MCA_mpi_ft_enable"
_NEEDED = "it needs Open MPI 5, and mpirun --with-ft ulfm"


def missing_mitigation() -> str | None:
    """What this process's MPI lacks to continue without a dead rank; None if it lacks nothing."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    if not hasattr(MPI.Comm, "Shrink"):
        return f"it needs mpi4py 4 or later; this mpi4py has no MPI_Comm_shrink (MPI: {name})"
    try:
        MPI.COMM_SELF.Is_revoked()
    except (NotImplementedError, MPI.Exception):
        return f"{_NEEDED}; this MPI is {name}"
    if os.environ.get(_SWITCH, "").lower() not in ("1", "true", "yes"):
        return f"{_NEEDED}; this MPI is {name}, started without --with-ft"
    return None


def is_majority(hosts: Sequence[str], left: Sequence[str]) -> bool:
    """Whether those that are left may go on: no other part of the run can do so as well.

    Ranks of one host see each other die. But a host that fell silent may only be cut off, and take the others for dead
    as they do this one. So more hosts have to be left than are gone, and of two halves neither goes on.

    Args:
        hosts: of each rank before.
        left: of those that are left.
    """
    return len(set(left)) > len(set(hosts) - set(left))


class Survival:
    """What this rank knows about the death of others.

    Args:
        comm: the ranks. No message is sent by it with tag 1.
        members: their numbers at the start of the run, and their hosts, in the order of the ranks.

    Attributes:
        comm, members: those of the last :meth:`shrink`.
    """

    def __init__(self, comm: MPI.Intracomm, members: Sequence[tuple[int, str]]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.members = list(members)
        self._deaths = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        # An agreement on these ranks has failed, on all of them.
        self._given_up = False
        self._recovering: int | None = None

    @property
    def first_rank(self) -> int:
        """This rank's number at the start of the run."""
        return self.members[self.comm.rank][0]

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
        """Raise if a rank is known to have died, and in other threads until the ranks have re-formed.

        Raises:
            RanksLostError: names it, if MPI does.
        """
        others_turn = self._recovering is not None and self._recovering != threading.get_ident()
        if others_turn or self.lost:
            raise self._error()

    def explain(self, error: BaseException) -> None:
        """Raise RanksLostError if ``error`` is MPI's error for a dead rank; else return.

        Raises:
            RanksLostError: it is.
        """
        if isinstance(error, self._mpi.Exception) and error.Get_error_class() in self._deaths:
            raise self._error() from error

    def begin(self) -> None:
        """From here to :meth:`end`, end the waits of other threads: this thread re-forms the ranks."""
        self._recovering = threading.get_ident()

    def end(self) -> None:
        self._recovering = None

    def give_up(self, timeout: Timeout) -> None:
        """Make every remaining rank call :meth:`shrink` next, whether it is in a wait or in :meth:`agree`.

        Open MPI's Shrink begins with agreements of its own, which are told apart by their number on the communicator
        (Herault et al. 2015, https://doi.org/10.1145/2807591.2807665): a rank that shrinks would take part in the
        agreement in which another one is. So a rank that leaves votes against it first, and all learn of that alike.
        """
        self.comm.Revoke()
        if not self._given_up:
            self._vote(0, timeout, "agreeing to continue without the ranks that died")

    def shrink(self) -> list[LostRank]:
        """Replace :attr:`comm` by its remaining ranks; returns the others.

        Collective over those that are left, all after :meth:`give_up`.
        """
        before = self.comm
        # Open MPI 5.0.11 ends its non-blocking form with an internal error.
        fresh = before.Shrink()
        old, new = before.Get_group(), fresh.Get_group()
        translated = self._mpi.Group.Translate_ranks(old, None, new)
        old.Free()
        new.Free()
        lost = [
            LostRank(rank=rank, first_rank=first_rank, host=host)
            for rank, (first_rank, host) in enumerate(self.members)
            if translated[rank] == self._mpi.UNDEFINED
        ]
        gone = {each.rank for each in lost}
        self.members = [member for rank, member in enumerate(self.members) if rank not in gone]
        self.comm, self._given_up = cast("MPI.Intracomm", fresh), False
        return lost

    def agree(self, timeout: Timeout) -> None:
        """A barrier that all ranks pass, or none.

        Raises:
            RanksLostError: one died; every rank that is left gets it.
            HpctrainError: a rank that lives does not come in time.
        """
        if not self._vote(1, timeout, "agreeing on what is done"):
            raise self._error()

    def _vote(self, own: int, timeout: Timeout, what: str) -> bool:
        """Whether every rank votes 1 and none died; the same on all of them."""
        votes = np.full(1, own, dtype=np.intc)
        try:
            timeout.finish(lambda: self.comm.Iagree(votes), what, heed=False)
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
        return RanksLostError(f"{names or 'a rank'} died")
