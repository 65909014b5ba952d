"""Times one training step of a network under meshes, with data parallelism and without communication, in turn.

``MALLOC_MMAP_THRESHOLD_=131072 hpctrain run benchmarks/mesh_steps.py -np 4 --backend mpi -- gpt 30 8 dp_shard=4
dp_shard=2,tp=2``: the network of ``hpctrain bench step``, rounds, samples for each rank, and meshes. tp and pp divide
gpt only. All meshes have equally many samples in a step and use hpctrain's own process groups. Rank 0 prints a row of
JSON for each: ``variant``, ``median_s``, ``samples_per_s``, ``ratio_to_limit`` (no communication) and
``ratio_to_data_parallel``.
"""

from __future__ import annotations

import json
import statistics
import sys

from mpi4py import MPI

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh, parse_mesh
from hpctrain.report.benchmarks import LIMIT, ratio
from hpctrain.worker.adapters.data_ranks import data_place, set_mesh
from hpctrain.worker.adapters.torch.parallel import ParallelPlan
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.step import adapted, alone, sgd
from hpctrain.worker.bench.workloads import BenchWorkload, mean_loss, workload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.train.mesh_trainer import plan_of

_DATA_PARALLEL = "data parallel"
# The side of ResNet-50's images in pixels.
_IMAGE_SIZE = 64


def shared_workload(comm: Communicator, mesh: Mesh, model: str, *, batch: int) -> BenchWorkload:
    """A network with this rank's part of a batch, under a mesh that the ranks have from then on.

    Args:
        batch: samples for each rank. Ranks that share samples, as those of a tp group, get theirs together, so that a
            step has equally many under every mesh.
    """
    set_mesh(comm, mesh)
    place = data_place(comm)
    return workload(model, batch=batch * comm.size // place.ranks, image_size=_IMAGE_SIZE, rank=place.rank)


def pipelined(work: BenchWorkload, comm: Communicator, plan: ParallelPlan) -> Call:
    """``ht.Pipeline`` with its defaults, whose stages are divided over the ranks of pp."""
    model = work.build()
    optimizer = sgd(model)
    pipeline = ht.Pipeline(model, optimizer, mean_loss, plan=plan, comm=comm)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(work.x, work.y)
        optimizer.step()

    return step


def main(model: str, rounds: str, batch: str, *meshes: str) -> None:
    comm = ht.init("mpi")
    world = MPI.COMM_WORLD.Dup()
    samples = int(batch)
    plain = shared_workload(comm, Mesh(), model, batch=samples)
    calls = {LIMIT: alone(plain), _DATA_PARALLEL: adapted(plain, comm)}
    for text in meshes:
        mesh = parse_mesh(text).at(comm.size)
        work = shared_workload(comm, mesh, model, batch=samples)
        calls[str(mesh)] = (pipelined if mesh.pp > 1 else adapted)(work, comm, plan=plan_of(model))
    seconds = time_in_turn(world, [TimedGroup(calls=calls)], rounds=int(rounds))
    if comm.rank:
        return
    for name, times in seconds.items():
        row = {
            "variant": name,
            "median_s": statistics.median(times),
            "samples_per_s": samples * comm.size / statistics.median(times),
            "ratio_to_limit": ratio(seconds, name, LIMIT),
            "ratio_to_data_parallel": ratio(seconds, name, _DATA_PARALLEL),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
