"""The parameter server and trainings with it, on some ranks, for test_asynchronous.py to look at.

Usage: asynchronous.py FRAMEWORK OUTPUT, which gets ``OUTPUT-RANK.npz`` and rank 0's ``OUTPUT-CASE.jsonl``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from local_steps import MOMENTUM, SGD
from mpi4py import MPI
from recipe_runs import data, new_trainer, parameters, recipe, told
from recipe_runs import train as trained

import hpctrain as ht
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.parameter_server import ParameterServer
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import epoch_order
from hpctrain.worker.train.asynchronous import AsynchronousLoop, Downpour

CASES: dict[str, dict[str, Any]] = {
    "downpour": {"optimizer": MOMENTUM, "sync": {"mode": "async"}},
    "easgd": {"optimizer": SGD, "sync": {"mode": "async", "rule": "easgd", "every": 2}},
    # Every rank computes a part of one sample, and what is left of the last batch has fewer parts than ranks.
    "parts": {"optimizer": SGD, "sync": {"mode": "async", "staleness": 1}, "batch": {"size": 20, "micro_batch": 2}},
}
STEPS = 40
# Of three batches of 20 samples on three ranks, and of the last, which has one.
PARTS = 10


def additions(comm: Communicator, length: int) -> dict[str, np.ndarray]:
    """All ranks add at the same time, by both calls; what was there before is never less than the rank's own part."""
    server = comm.parameter_server(length)
    server.begin(np.full(length, 2, np.float32), staleness=1)
    one = np.ones(length, np.float32)
    least = []
    for turn in range(STEPS + comm.rank):
        least.append((server.add(one) - 2 - turn * 2).min())
        server.push(one)
    server.end()
    comm.barrier()
    return {f"sum of {length}": server.read(), f"least of {length}": np.array(least)}


def steps(comm: Communicator, server: ParameterServer) -> dict[str, np.ndarray]:
    """Numbers that are given out until somebody closes, which rank 0 does after the last."""
    server.begin(np.zeros(4, np.float32), staleness=1000)
    taken = []
    while (number := server.take_step()) is not None:
        taken.append(number)
        if number == STEPS:
            server.close()
    comm.barrier()
    return {"taken": np.array(taken), "after": np.array(server.take_step() is None)}


def staleness(comm: Communicator, server: ParameterServer) -> dict[str, np.ndarray]:
    """Rank 0 computes step 0 until it has added to the vector. Steps up to 2 need not wait for it, and step 3 has to.

    And then it goes on computing step 3, for which nobody waits in vain for ever.
    """
    server.begin(np.zeros(4, np.float32), staleness=2)
    if comm.rank == 0:
        server.begin_step(0)
        comm.barrier()
        comm.barrier()
        time.sleep(0.3)
        server.push(np.ones(4, np.float32))
        server.begin_step(3)
        for rank in range(1, comm.size):
            MPI.COMM_WORLD.recv(source=rank)
        comm.barrier()
        return {}
    comm.barrier()
    server.begin_step(comm.rank)
    server.begin_step(2)
    comm.barrier()
    server.begin_step(3)
    seen = server.read()
    comm.timeout.seconds, before = 3.0, comm.timeout.seconds
    waited = told(lambda: server.begin_step(6))
    comm.timeout.seconds = before
    MPI.COMM_WORLD.send("waited", 0)
    comm.barrier()
    return {"seen": seen, "waited": waited}


def train(case: str, comm: Communicator, trainer: Any, output: str, **settings: Any) -> AsynchronousLoop:
    chosen = recipe(**CASES[case.partition(" ")[0]])
    loop: AsynchronousLoop = trained(case, chosen, comm, trainer, output, kind=AsynchronousLoop, **settings)
    return loop


def hold_up(loop: AsynchronousLoop, trainer: Any) -> None:
    """Each step of rank 0 lasts until the others have taken all further ones of the epoch."""
    if loop._comm.rank:
        return
    step: Callable[..., float] = trainer.step

    def until_all_are_taken(*arguments: Any) -> float:
        while loop._server._word(0, 0, MPI.SUM)[0] < PARTS:
            time.sleep(0.002)
        return step(*arguments)

    trainer.step = until_all_are_taken


def faulty(framework: str, comm: Communicator, output: str) -> None:
    """A sample of the first batch is not a number."""
    samples, _ = data()
    images = samples.images.copy()
    images[epoch_order(len(samples), seed=3, epoch=0)[0]] = np.nan
    broken = Samples(images=images, labels=samples.labels)
    train("downpour faulty", comm, new_trainer(framework, recipe(**CASES["downpour"]), comm), output, samples=broken)


@contextlib.contextmanager
def recorded(comm: Communicator) -> Iterator[list[np.ndarray]]:
    """What this rank's exchanges by Downpour change at the server."""
    changes: list[np.ndarray] = []
    exchange = Downpour.exchange

    def recording(rule: Downpour, own: np.ndarray) -> np.ndarray:
        changes.append((own.astype(np.float64) - rule._got) / comm.size)
        return exchange(rule, own)

    Downpour.exchange = recording
    try:
        yield changes
    finally:
        Downpour.exchange = exchange


def main(framework: str, output: str) -> None:
    comm = ht.init()
    results = {}
    if framework == "torch" and comm.size > 1:
        for length in (2, 1001):
            results |= additions(comm, length)
        server = comm.parameter_server(4)
        results |= steps(comm, server) | staleness(comm, server)
    for case in CASES:
        trainer = new_trainer(framework, recipe(**CASES[case]), comm)
        begun, results[f"{case} begun"] = trainer.vector(), parameters(trainer)
        with recorded(comm) as changes:
            loop = train(case, comm, trainer, output)
        if changes:
            results[f"{case} moved"], results[f"{case} end"] = begun / comm.size + sum(changes), trainer.vector()
        results |= {case: parameters(trainer), f"{case} updates": np.array(trainer.updates)}
        results[f"{case} iterations"] = np.array(loop.iteration)
    results["non-finite"] = told(lambda: faulty(framework, comm, output))
    if comm.size > 1:
        trainer = new_trainer(framework, recipe(**CASES["easgd"]), comm)
        train("easgd held up", comm, trainer, output, begin=lambda loop: hold_up(loop, trainer))
        results["held up updates"] = np.array(trainer.updates)
    else:
        trainer = new_trainer(framework, recipe(**CASES["downpour"]), comm)
        stopped = train("downpour stopped", comm, trainer, output, stop_at=2)
        trainer = new_trainer(framework, recipe(**CASES["downpour"]), comm)
        train("downpour stopped", comm, trainer, output, resume_from=stopped.iteration)
        results |= {"resumed": parameters(trainer), "stopped after": np.array(stopped.iteration)}
    np.savez(f"{output}-{comm.rank}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
