"""Starts ``hpctrain data shard`` and ``prepare-text``: in this process, or on ranks of this machine or of others."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

import hpctrain
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.printable import printable
from hpctrain.common.run.plan import HostOptions, Script, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.shards.make import ShardRequest
from hpctrain.common.shards.shard_work import Manifest, Work, make
from hpctrain.common.stderr import tell
from hpctrain.control.programs.bench import run_on_hosts

_PROGRAM = Path(hpctrain.__file__).parent / "worker" / "programs" / "shard.py"
# Several processes share the cores.
_START = Start(environment={"TOKENIZERS_PARALLELISM": "false"})


def _say(text: str) -> None:
    tell(printable(text))


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
    require("train", "imagenet") if isinstance(work, ShardRequest) else require("text")
    named = hosts.hosts is not None or hosts.hostfile is not None
    if not named and ranks in (None, 1):
        return make(work, map, _say)
    require("train")

    def request(out: Path) -> TrainingRequest:
        script = Script(path=_PROGRAM, arguments=(work.model_dump_json(), str(out)))
        return TrainingRequest(work=script, backend="mpi", host_options=hosts, start=_START)

    # The rank that hands out the work mostly waits.
    made, _ = run_on_hosts(request, ranks, hosts, further=1)
    if "error" in made:
        raise HpctrainError.from_record(made["error"])
    return TypeAdapter[Manifest](Manifest).validate_python(made["manifest"])
