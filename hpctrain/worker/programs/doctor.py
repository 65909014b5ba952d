"""What ``hpctrain doctor`` runs on every rank: the checks of each host, and a real all-reduce.

``python doctor.py FOLDER RANKS RUN_DIRECTORY`` on every rank. Rank 0 writes ``FOLDER/world-HOST-PID.json``. If launcher
and MPI do not match, every process is rank 0 of 1, and each writes one. Every wait has a limit. Ranks without MPI meet
over Gloo.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.cluster.gpus import usable_gpus
from hpctrain.common.cluster.launcher import TORCHRUN, detect
from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import write_json
from hpctrain.common.settings import TIMEOUT
from hpctrain.control.doctor.host_checks import check_host
from hpctrain.control.doctor.host_facts import Host
from hpctrain.control.doctor.rank_checks import NUMBERS, MeasuredAllreduce, World
from hpctrain.control.horovod.fingerprint import find_installed

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.worker.comm.base import AnyArray, Communicator

# The limit of the whole process, which also holds where MPI or Horovod hang outside Python.
LIMIT_SECONDS = 30
# The limit of one wait for the other ranks.
_WAIT_SECONDS = 10
_REASON = "hpctrain doctor"
_REPEATS = 7
# With these factors sums stay exact in float32 up to 100,000 ranks.
_LARGEST, _WEIGHTS = 16, 8


def main(folder: str, ranks: str, run_directory: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    os.environ[TIMEOUT.name] = str(_WAIT_SECONDS)
    launcher = detect()
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    out = Path(folder) / f"world-{host}-{os.getpid()}.json"
    world = World(
        host=host,
        size=int(ranks),
        launcher=launcher.name if launcher else None,
        claimed=launcher.size if launcher else None,
    )
    if launcher and launcher.name == TORCHRUN:
        from hpctrain.worker.comm.connecting import connect

        comm = connect("gloo", launcher)
        _check_together(comm, None, replace(world, size=comm.size), out, Path(run_directory))
    else:
        from mpi4py import MPI

        vendor, version = MPI.get_vendor()
        size = MPI.COMM_WORLD.Get_size()
        world = replace(world, size=size, mpi=f"{vendor} {'.'.join(map(str, version))}")
        if size != int(ranks):
            write_json(out, {"worlds": [asdict(world)]})
        else:
            from hpctrain.worker.comm.horovod import HorovodCommunicator

            together = HorovodCommunicator(MPI.COMM_WORLD, _REASON)
            _check_together(together, MPI.COMM_WORLD, world, out, Path(run_directory))
    faulthandler.cancel_dump_traceback_later()


def _check_together(
    comm: Communicator, mpi: MPI.Intracomm | None, world: World, out: Path, run_directory: Path
) -> None:
    """Run the checks that need all ranks. Rank 0 writes before trying each engine, so that a hang loses nothing."""
    seen = comm.allgather_object((world, comm.local_rank, os.environ.get("CUDA_VISIBLE_DEVICES")))
    hosts = list(dict.fromkeys(other.host for other, _, _ in seen))
    mine = [visible for other, _, visible in seen if other.host == world.host]
    # Hosts are told apart by name and not by shared memory, because daemons of a local Slurm count as hosts.
    first = [other.host for other, _, _ in seen].index(world.host) == comm.rank
    host = Host(ranks=len(mine), hosts=len(hosts), visible=tuple(mine)) if first else None
    result = None
    if host:
        checks = [asdict(check) for check in check_host(host, run_directory)]
        result = {"checks": checks, "versions": this_machine().versions}
    results = comm.allgather_object(result)
    measured: dict[str, Any] = {
        "worlds": [asdict(other) for other, _, _ in seen],
        "hosts": {other.host: checked for (other, _, _), checked in zip(seen, results, strict=True) if checked},
        "reductions": [asdict(_plain(comm, "MPI" if mpi else "Gloo"))],
    }
    engines: dict[str, Callable[[Communicator], MeasuredAllreduce]] = {"NCCL": partial(_nccl, mpi)}
    if mpi:
        engines = {"Horovod": _horovod, **engines}
    for engine, reduce in engines.items():
        if comm.rank == 0:
            unfinished = MeasuredAllreduce(engine=engine, error="did not end")
            write_json(out, {**measured, "reductions": [*measured["reductions"], asdict(unfinished)]})
        measured["reductions"].append(asdict(reduce(comm)))
    if comm.rank == 0:
        write_json(out, measured)
    comm.shutdown()


def _numbers(rank: int) -> AnyArray:
    return (np.arange(NUMBERS) % _LARGEST * (rank % _WEIGHTS + 1)).astype(np.float32)


def _expected(ranks: int) -> AnyArray:
    total = np.zeros(NUMBERS, np.float32)
    for weight in range(_WEIGHTS):
        total += _numbers(weight) * len(range(weight, ranks, _WEIGHTS))
    return total


def _plain(comm: Communicator, engine: str) -> MeasuredAllreduce:
    numbers, seconds = _numbers(comm.rank), []
    for _ in range(_REPEATS):
        comm.barrier()
        start = time.perf_counter()
        reduced = comm.allreduce(numbers, "sum")
        seconds.append(time.perf_counter() - start)
    right = bool(np.array_equal(reduced, _expected(comm.size)))
    return _agree(comm, MeasuredAllreduce(engine=engine, seconds=statistics.median(seconds), right=right))


def _horovod(comm: Communicator) -> MeasuredAllreduce:
    """By Horovod with PyTorch; ``hpctrain horovod build`` has proved that with TensorFlow."""
    installed = find_installed()
    if not all(comm.allgather_object(bool(installed and "torch" in installed.packages))):
        why = "Horovod is not built for PyTorch on every host"
        return MeasuredAllreduce(engine="Horovod", error=why, possible=False)
    return _reduce("Horovod", comm, lambda: comm, "cpu")


def _nccl(mpi: MPI.Intracomm | None, comm: Communicator) -> MeasuredAllreduce:
    """By NCCL, where every rank has a GPU, or may share one."""
    if not all(comm.allgather_object(usable_gpus() > 0 and find_spec("torch") is not None)):
        return MeasuredAllreduce(engine="NCCL", error="not every host has a GPU and PyTorch", possible=False)

    def start() -> Communicator:
        from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator

        if mpi is None:
            # A process has one default group.
            comm.shutdown()
        return TorchDistributedCommunicator("nccl", _REASON, mpi)

    return _reduce("NCCL", comm, start, "cuda")


def _reduce(
    name: str,
    comm: Communicator,
    start: Callable[[], Communicator],
    device: str,
) -> MeasuredAllreduce:
    """Reduce with the engine of a communicator, to the mean."""
    try:
        import torch

        group = start()
        engine = group.torch()
        buffer = engine.allocate(NUMBERS, torch.float32, torch.device(device))
        seconds = []
        for _ in range(_REPEATS):
            buffer.copy_(torch.from_numpy(_numbers(comm.rank)))
            begin = time.perf_counter()
            engine.allreduce(buffer, "doctor").wait()
            if buffer.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        right = bool(np.allclose(buffer.cpu().numpy(), _expected(comm.size) / comm.size, rtol=1e-6))
        found = _agree(group, MeasuredAllreduce(engine=name, seconds=statistics.median(seconds), right=right))
        if group is not comm:
            group.shutdown()
    except HpctrainError as error:
        # Who asks for more ranks than GPUs has not asked for NCCL.
        possible = error.code != "HT-gpus-too-few" or not error.values["gpus"]
        return MeasuredAllreduce(engine=name, error=error.message, possible=possible)
    except (ImportError, RuntimeError) as error:
        return MeasuredAllreduce(engine=name, error=str(error).partition("\n")[0])
    return found


def _agree(comm: Communicator, reduction: MeasuredAllreduce) -> MeasuredAllreduce:
    """The same result, right only if it is right on every rank. Collective."""
    right = float(comm.allreduce(np.array([reduction.right], np.float64), "min")[0])
    return MeasuredAllreduce(engine=reduction.engine, seconds=reduction.seconds, right=bool(right))


if __name__ == "__main__":
    main(*sys.argv[1:])
