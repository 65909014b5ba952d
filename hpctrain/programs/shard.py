"""Starts ``hpctrain data shard``: in this process, or on ranks of this machine."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import hpctrain
from hpctrain.errors import HpctrainError
from hpctrain.extras import require
from hpctrain.planning.machine import this_machine
from hpctrain.planning.planner import make_plan
from hpctrain.programs.bench import run_program
from hpctrain.run.plan import Script
from hpctrain.shards.make import Sharding, make_shards
from hpctrain.shards.manifest import ShardManifest
from hpctrain.supervision.start import prove_launcher

_PROGRAM = Path(hpctrain.__file__).parent / "rank_programs" / "shard.py"


def shard(sharding: Sharding, ranks: int) -> ShardManifest:
    """Make the folder, or what of it is missing or damaged.

    Args:
        ranks: how many make shards; beyond one, a further one hands out the work.

    Raises:
        HpctrainError: as of :func:`hpctrain.shards.make.make_shards`; a package is missing, there is no launcher, or
            a rank failed.
    """
    require("train", "imagenet")
    if ranks == 1:
        return make_shards(sharding, map, partial(print, file=sys.stderr))
    return _on_ranks(sharding, ranks)


def _on_ranks(sharding: Sharding, ranks: int) -> ShardManifest:
    absolute = sharding.model_copy(update={"source": sharding.source.absolute(), "folder": sharding.folder.absolute()})
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="hpctrain-shard-") as name:
        folder = Path(name)
        out = folder / "made.json"
        work = Script(path=_PROGRAM, arguments=(str(out), absolute.model_dump_json()))
        plan = make_plan(work, machine, ranks=ranks + 1, backend="mpi")
        made = run_program(plan, folder, machine, prove_launcher(plan, machine, folder), out)
    if "error" in made:
        raise HpctrainError(made["error"]["message"], made["error"]["hint"], exit_code=made["error"]["exit_code"])
    return ShardManifest.model_validate(made["manifest"])
