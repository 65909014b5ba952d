"""Times one training step of a network under meshes, with data parallelism and without communication, in turn.

``python mesh_step.py OUT.json MODEL ROUNDS BATCH IMAGE_SIZE MESH…`` on every rank. A step has BATCH samples for each
rank under every mesh, and all use hpctrain's own process groups.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpi4py import MPI

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh, parse_mesh
from hpctrain.worker.adapters.torch.parallel import ParallelPlan
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.bench.step import adapted, alone, sgd
from hpctrain.worker.bench.workloads import BenchWorkload, mean_loss, shared_workload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.train.parallel_plan import plan_of


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


def main(out: str, model: str, rounds: str, batch: str, image_size: str, *meshes: str) -> None:
    comm = ht.init("mpi")
    world = MPI.COMM_WORLD.Dup()
    size = {"batch": int(batch), "image_size": int(image_size)}
    plain = shared_workload(comm, Mesh(), model, **size)
    calls = {"no communication": alone(plain), "data parallel": adapted(plain, comm)}
    for text in meshes:
        mesh = parse_mesh(text).at(comm.size)
        work = shared_workload(comm, mesh, model, **size)
        calls[str(mesh)] = (pipelined if mesh.pp > 1 else adapted)(work, comm, plan=plan_of(model))
    seconds = time_in_turn(world, [TimedGroup(calls=calls)], rounds=int(rounds))
    if comm.rank == 0:
        tokens = plain.x[0].numel() if model in ("transformer", "gpt") else None
        Path(out).write_text(json.dumps({"seconds": seconds, "tokens_each": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
