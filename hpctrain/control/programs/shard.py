"""Starts ``hpctrain data shard`` and ``prepare-text``: in this process, or on ranks of this machine or of others."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import hpctrain
from hpctrain.common.cluster.machine import same_host, this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.printable import printable
from hpctrain.common.run.plan import HostOptions, Script, Slots, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.shards.make import ShardRequest
from hpctrain.common.shards.shard_work import Manifest, Work, as_manifest, make, with_absolute_paths
from hpctrain.control.hosts.arrange import arrange
from hpctrain.control.launchers.launcher_choice import choose_launcher
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.programs.bench import run_program, working_folder

_PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "shard.py"
# Several processes share the cores.
_START = Start(environment={"TOKENIZERS_PARALLELISM": "false"})


def require_extras(work: Work) -> None:
    """Make sure that the packages that make the shards are installed.

    Raises:
        HpctrainError: an extra is missing.
    """
    require("train", "imagenet") if isinstance(work, ShardRequest) else require("text")


def say(text: str) -> None:
    """Report progress on stderr, beside the result."""
    print(printable(text), file=sys.stderr)


def on_ranks(work: Work, ranks: int | None, hosts: HostOptions = HostOptions()) -> Manifest:
    """Make the folder, or what of it is missing or damaged.

    Args:
        work: what to make; all hosts see its source and its folder.
        ranks: how many make shards; beyond one, a further one on the first host hands out the work. None for as many as
            the hosts have slots.
        hosts: by default this machine, also in a job.

    Raises:
        HpctrainError: the source or the folder does not fit, a package is missing, there is no launcher, hosts do not
            answer, or a rank failed.
    """
    require_extras(work)
    named = hosts.hosts is not None or hosts.hostfile is not None
    if not named and ranks in (None, 1):
        return make(work, map, say)
    require("train")
    machine = this_machine()
    # Without named hosts this machine is meant, also within a job.
    arranged, warnings = arrange(hosts, machine.host, ranks, os.environ if named else {})
    for warning in warnings:
        say(f"hpctrain: warning: {warning}")
    away = any(not same_host(host.host, machine.host) for host in arranged.slots)
    with working_folder(shared=away) as name:
        folder = Path(name).absolute()
        out = folder / "made.json"
        request = TrainingRequest(work=shard_script(work, str(out)), backend="mpi", host_options=hosts, start=_START)
        plan = make_plan(request, machine, _with_coordinator_slot(arranged))
        made = run_program(plan, folder, machine, choose_launcher(plan, machine, folder), out)
    if "error" in made:
        raise HpctrainError.from_record(made["error"])
    return as_manifest(made["manifest"])


def shard_script(work: Work, *out: str) -> Script:
    """The script of the ranks; rank 0 writes the result to ``out``, where it is given."""
    return Script(path=_PROGRAM, arguments=(with_absolute_paths(work).model_dump_json(), *out))


def _with_coordinator_slot(hosts: PlacedHosts) -> PlacedHosts:
    """The same with room on the first host for the rank that hands out the work, which mostly waits."""
    first, *others = hosts.slots
    return replace(hosts, slots=(Slots(host=first.host, slots=first.slots + 1), *others))
