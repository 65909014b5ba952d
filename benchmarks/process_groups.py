"""Times collectives of torch.distributed over Gloo and over hpctrain's own process group, and what is built on them.

``hpctrain run benchmarks/process_groups.py -np 2 --backend mpi -- 1024,65536,1048576,67108864 20 8``: bytes of the
whole tensor, rounds, and rows of 64 tokens for each rank in the step. Both groups run in one process and take turns.
Each one's results are compared with the closed form before it is measured. A step of the small transformer under FSDP2,
with every block sharded, is timed too. Rank 0 prints a row of JSON for each.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.report.benchmarks import ratio
from hpctrain.worker.bench.allreduce import repeats_of, rounds_of
from hpctrain.worker.bench.baselines import join_process_group
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.workloads import BenchWorkload, workload
from hpctrain.worker.comm.mpi import MpiCommunicator

_FLOAT_BYTES = 4
# From a group and a number of elements: the call of a collective, its output, and the value that this should have.
_Start = Callable[[Any, int], tuple[Call, torch.Tensor, float]]
STEP = "FSDP2 step"


def _all_gather(group: Any, numel: int) -> tuple[Call, torch.Tensor, float]:
    own, out = torch.ones(numel // group.size()), torch.zeros(numel // group.size() * group.size())
    return lambda: dist.all_gather_single(out, own, group), out, 1.0


def _reduce_scatter(group: Any, numel: int) -> tuple[Call, torch.Tensor, float]:
    source, out = torch.ones(numel // group.size() * group.size()), torch.zeros(numel // group.size())
    return lambda: dist.reduce_scatter_single(out, source, group=group), out, group.size()


def _all_reduce(group: Any, numel: int) -> tuple[Call, torch.Tensor, float]:
    # A mean of ones stays one, however often it is taken.
    buffer = torch.ones(numel)
    return lambda: dist.all_reduce(buffer, dist.ReduceOp.AVG, group), buffer, 1.0


def _all_to_all(group: Any, numel: int) -> tuple[Call, torch.Tensor, float]:
    source = torch.ones(numel // group.size() * group.size())
    out = torch.zeros_like(source)
    return lambda: dist.all_to_all_single(out, source, group=group), out, 1.0


COLLECTIVES: dict[str, _Start] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


def calls_of(start: _Start, name: str, groups: dict[str, Any], nbytes: int) -> dict[str, Call]:
    """The calls of a collective over each group; raises HpctrainError if one gives a wrong result."""
    calls = {}
    for group_name, group in groups.items():
        call, result, wanted = start(group, nbytes // _FLOAT_BYTES)
        call()
        if not bool((result == wanted).all()):
            raise HpctrainError(
                "HT-reduction-wrong-result",
                "{collective} of {bytes} bytes over {group} gave a wrong result",
                exit_code=1,
                collective=name,
                bytes=nbytes,
                group=group_name,
            )
        calls[group_name] = call
    return calls


def fsdp_step(work: BenchWorkload, group: Any) -> Call:
    """One step of a network whose blocks, and then the rest of it, are sharded over a group."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = work.build()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return work.step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def main(sizes: str, rounds: str, batch: str) -> None:
    comm = ht.init("mpi")
    assert isinstance(comm, MpiCommunicator)
    world = MPI.COMM_WORLD.Dup()
    join_process_group(world)
    comm.process_groups()
    # Prevents the warning at the end that each rank trained by itself.
    comm.distributed = True
    groups = {"gloo": dist.group.WORLD, "hpctrain": dist.new_group(backend="hpctrain")}
    calls = {
        (name, nbytes): calls_of(start, name, groups, nbytes)
        for name, start in COLLECTIVES.items()
        for nbytes in map(int, sizes.split(","))
    }
    work = workload("transformer", batch=int(batch), image_size=0, rank=comm.rank)
    numel = sum(parameter.numel() for parameter in work.build().parameters())
    calls[STEP, numel * _FLOAT_BYTES] = {name: fsdp_step(work, group) for name, group in groups.items()}
    for (name, nbytes), by_group in calls.items():
        repeats = 1 if name == STEP else repeats_of(nbytes)
        seconds = time_in_turn(
            world, [TimedGroup(calls=by_group)], rounds=rounds_of(nbytes, int(rounds)), repeats=repeats
        )
        for group, times in seconds.items() if comm.rank == 0 else ():
            row = {"collective": name, "bytes": nbytes, "group": group, "median_s": statistics.median(times)}
            print(json.dumps({**row, "ratio_to_gloo": ratio(seconds, group, "gloo")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
