"""Times one float32 all-reduce with each engine, from small to large, and a plain copy of as many bytes as the limit.

``python allreduce.py OUT.json SIZES ROUNDS`` on every rank; SIZES in bytes, joined by commas. All engines run in one
process and reduce to the mean, in place; each one's result is compared with the closed form before it is measured.
Between hosts hpctrain's own engine also sends float16 and bfloat16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.bench.baselines import LeftOut, horovod_running, join_process_group, load_horovod
from hpctrain.worker.bench.in_turn import Call, TimedGroup, time_in_turn
from hpctrain.worker.comm.engines import TorchEngine

_FLOAT_BYTES = 4
# Between two readings of the clock small reductions are repeated up to so many bytes, in at most so many calls.
_REPEATED_BYTES = 1 << 20
_MOST_REPEATS = 32
# Larger reductions get fewer rounds, but not fewer than this.
_MANY_ROUNDS_BYTES = 16 << 20
_FEWEST_ROUNDS = 7
_PATTERN = 251


@dataclass(frozen=True, kw_only=True)
class TimedReduction:
    """One engine's all-reduce of one size: the buffer, and the call that replaces it by its mean."""

    buffer: torch.Tensor
    call: Call
    # The largest relative error of the mean.
    tolerance: float = 1e-5


MakeReduction = Callable[[int], TimedReduction]


def by_engine(engine: TorchEngine, name: str, largest: int, wire: torch.dtype | None = None) -> MakeReduction:
    """All-reduce by one of hpctrain's engines as the adapters use it, on a buffer that the engine allocated.

    Args:
        wire: the type in which gradients are sent; None for their own.
    """
    memory = engine.allocate(largest, torch.float32, torch.device("cpu"))
    tolerance = torch.finfo(wire or torch.float32).eps * 10

    def make(numel: int) -> TimedReduction:
        buffer, own_name = memory[:numel], f"{name}.{numel}"
        return TimedReduction(
            buffer=buffer, call=lambda: engine.allreduce(buffer, own_name, wire).wait(), tolerance=tolerance
        )

    return make


def by_mpi(world: MPI.Intracomm) -> MakeReduction:
    """MPI_Allreduce in place, followed by the division that turns the sum into a mean."""

    def make(numel: int) -> TimedReduction:
        array = np.zeros(numel, np.float32)
        # The fastest ways to pass a buffer and a factor, which matters when the reduction takes microseconds.
        message = (array, MPI.FLOAT)
        scale = np.array(1 / world.size, np.float32)

        def call() -> None:
            world.Allreduce(MPI.IN_PLACE, message)
            np.multiply(array, scale, array)

        return TimedReduction(buffer=torch.from_numpy(array), call=call)

    return make


def by_process_group(device: torch.device) -> MakeReduction:
    """torch.distributed: Gloo for the CPU's memory, NCCL for a GPU's."""

    def make(numel: int) -> TimedReduction:
        buffer = torch.zeros(numel, device=device)

        def call() -> None:
            work = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return TimedReduction(buffer=buffer, call=call)

    return make


def copy(numel: int) -> Call:
    """The limit: every rank copies as many bytes at the same time."""
    source, target = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    return lambda: np.copyto(target, source)


def check(name: str, reduction: TimedReduction, world: MPI.Intracomm) -> None:
    """Compare one result with its closed form; raises HpctrainError if they differ."""
    pattern = torch.arange(reduction.buffer.numel(), device=reduction.buffer.device) % _PATTERN
    reduction.buffer.copy_(pattern + world.rank)
    reduction.call()
    if not torch.allclose(reduction.buffer, pattern + (world.size - 1) / 2, rtol=reduction.tolerance):
        raise HpctrainError(
            "HT-reduction-wrong-result",
            "{name} gave a wrong mean of {bytes} bytes",
            exit_code=1,
            name=name,
            bytes=reduction.buffer.nbytes,
        )


def rounds_of(nbytes: int, rounds: int) -> int:
    """The number of rounds for a size; fewer for large ones."""
    return max(min(rounds, _FEWEST_ROUNDS), min(rounds, rounds * _MANY_ROUNDS_BYTES // nbytes))


def repeats_of(nbytes: int) -> int:
    """How many calls of a size are timed together."""
    return max(1, min(_MOST_REPEATS, _REPEATED_BYTES // nbytes))


def measure(
    world: MPI.Intracomm, engines: dict[str, MakeReduction], horovod: MakeReduction | None, nbytes: int, rounds: int
) -> dict[str, list[float]]:
    """The seconds of each engine in each round, at one size."""
    numel = nbytes // _FLOAT_BYTES
    reductions = {name: make(numel) for name, make in engines.items()}
    for name, reduction in reductions.items():
        check(name, reduction, world)
    calls = {name: reduction.call for name, reduction in reductions.items()}
    groups = [TimedGroup(calls={"copy": copy(numel), **calls})]
    if horovod:
        reduction = horovod(numel)
        with horovod_running(world):
            check("horovod", reduction, world)
        groups.append(TimedGroup(calls={"horovod": reduction.call}, running=partial(horovod_running, world)))
    return time_in_turn(world, groups, rounds=rounds_of(nbytes, rounds), repeats=repeats_of(nbytes))


def main(out: str, sizes: str, rounds: str) -> None:
    comm = ht.init("mpi")
    world = MPI.COMM_WORLD.Dup()
    wanted = [int(size) for size in sizes.split(",")]
    largest = max(wanted) // _FLOAT_BYTES
    left_out: LeftOut = {}
    engines = {"mpi": by_engine(comm.torch(), "measured", largest), "MPI_Allreduce": by_mpi(world)}
    if comm.local_size < comm.size:
        for name, wire in (("mpi fp16", torch.float16), ("mpi bf16", torch.bfloat16)):
            engines[name] = by_engine(comm.torch(), name, largest, wire)
    group = join_process_group(world)
    engines["gloo"] = by_process_group(torch.device("cpu"))
    if group.on_gpus:
        engines["nccl"] = by_process_group(torch.device("cuda", torch.cuda.current_device()))
    horovod = load_horovod(world, left_out)
    by_horovod = by_engine(horovod.torch(), "measured", largest) if horovod else None
    seconds = {size: measure(world, engines, by_horovod, size, int(rounds)) for size in wanted}
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "left_out": left_out}))


if __name__ == "__main__":
    main(*sys.argv[1:])
