"""Chooses the samples that a rank computes at once where a recipe leaves it to the memory."""

from __future__ import annotations

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.backend import host_gpus
from hpctrain.common.run.plan import Plan, Slots


def sized(plan: Plan, machine: Machine) -> Plan:
    """A placed plan with a number in place of ``batch.micro_batch: auto``; one that has a number stays as it is.

    Args:
        machine: one of the hosts, whose memory the others are taken to have too.

    Raises:
        HpctrainError: the memory of the hosts is not known, or see
            :func:`hpctrain.control.predict.micro_batch.fitting`.
    """
    recipe = plan.recipe
    if recipe is None or recipe.batch.micro_batch != "auto":
        return plan
    # Imported here because it loads NumPy and the predictions, which other plans do not need.
    from hpctrain.control.predict.micro_batch import fitting

    room, place = min(_room(plan, host, machine) for host in plan.hosts)
    size = fitting(recipe, plan.ranks, room)
    share = recipe.batch.at_once(recipe.mesh.at(plan.ranks).data_ranks)
    reason = f"{size} of the {share} samples of a rank at once, by its predicted memory, for {place}"
    return plan.model_copy(update={"recipe": recipe.computing(size), "micro_batch_reason": reason})


def _room(plan: Plan, host: Slots, machine: Machine) -> tuple[float, str]:
    """The bytes that a rank of a host has, and of what."""
    # Over MPI, hpctrain keeps its models in the host's memory.
    on_cpu = plan.backend == "mpi" or machine.versions.get("torch", "").endswith("+cpu")
    gpus = 0 if on_cpu else host_gpus(host, machine)
    if gpus >= host.slots:
        return _known(machine.gpu_bytes, "GPUs"), f"a GPU of {_gigabytes(machine.gpu_bytes)}"
    if gpus and plan.start.share_gpus:
        each = -(-host.slots // gpus)
        room = _known(machine.gpu_bytes, "GPUs") / each
        return room, f"a GPU of {_gigabytes(machine.gpu_bytes)} that {each} ranks share"
    room = _known(machine.available_bytes, "hosts") / host.slots
    return room, f"{_gigabytes(machine.available_bytes)} of a host" + f" that {host.slots} ranks share" * (
        host.slots > 1
    )


def _known(nbytes: int | None, owners: str) -> int:
    if nbytes is None:
        raise HpctrainError(
            "HT-batch-auto-not-possible",
            "batch.micro_batch: auto needs the memory of the {owners}, which is not known here",
            "--set batch.micro_batch=N, or plan on one of the hosts",
            owners=owners,
        )
    return nbytes


def _gigabytes(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 1e9:.3g} GB"
