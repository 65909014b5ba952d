"""Checks what a fault-tolerant run needs, whose ranks continue without one that died."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import Plan

if TYPE_CHECKING:
    from hpctrain.control.launchers.command import Launcher

_WITHOUT = "--set fault_tolerance=stop ends the run resumably instead"


def require_choices(plan: Plan) -> None:
    """Refuse a chosen launcher that cannot continue without a dead rank, as the planner does with backends.

    Raises:
        HpctrainError: says which, and what to choose.
    """
    if plan.fault_tolerant and plan.start.launcher not in ("auto", "mpirun"):
        raise HpctrainError(
            f"fault_tolerance: shrink: {plan.start.launcher} ends the step of a rank that died",
            f"choose --launcher mpirun, of Open MPI 5; {_WITHOUT}",
        )


def require_mitigation(plan: Plan, launcher: Launcher) -> None:
    """Refuse a launcher that would end the remaining ranks: any but the mpirun of an Open MPI 5 with ULFM.

    Source: https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html.

    Raises:
        HpctrainError: says what is missing.
    """
    if not plan.fault_tolerant:
        return
    hint = f"load Open MPI 5 or later, or: pip install 'hpctrain[mpi]'; {_WITHOUT}"
    if not (isinstance(launcher, MpiInstallation) and launcher.flavour == "open-mpi-5"):
        raise HpctrainError(
            f"fault_tolerance: shrink needs the mpirun of Open MPI 5 or later, and {launcher.name} starts the ranks",
            hint,
        )
    if "options:ft_mpi_support:no" in program_output(str(launcher.mpirun.with_name("ompi_info")), "--parsable"):
        raise HpctrainError(
            f"fault_tolerance: shrink needs failure mitigation, and {launcher.name} was built without (--with-ft=no)",
            hint,
        )
