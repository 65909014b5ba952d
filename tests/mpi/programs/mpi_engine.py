"""The MPI engine on several arrangements of ranks into nodes, each result compared with a closed form.

``python mpi_engine.py CHECK …`` runs these checks; each prints one line a rank. Ranks that all share memory stand for
several nodes, because the engine is told which of them belong together.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from mpi4py import MPI
from situations import refused

from hpctrain.worker.adapters.torch.distribute import distribute, statistics
from hpctrain.worker.comm.mpi import MpiCommunicator
from hpctrain.worker.comm.shared import nodes
from hpctrain.worker.comm.shared.segments import Segment

WORLD = MPI.COMM_WORLD
CPU = torch.device("cpu")
# Nothing, less than a cache line, a line and one more, the largest of the small ones, odd, and many blocks.
SIZES = (0, 1, 17, 4096, 4097, 100_003, 300_001)
TYPES = (
    (torch.float64, None),
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.bfloat16),
)
NodeOf = Callable[[int], int]
# How many ranks, and the node of each.
LAYOUTS: dict[str, tuple[int, NodeOf | None]] = {
    "one node": (4, None),
    "two nodes": (4, lambda rank: rank // 2),
    "two nodes, ranks dealt in turn": (4, lambda rank: rank % 2),
    "three ranks and one": (4, lambda rank: rank // 3),
    "one rank, two, and one": (4, lambda rank: (rank + 1) // 2),
    "three nodes": (3, lambda rank: rank),
}


sharing_memory = nodes.ranks_of_node


def communicator(world: MPI.Intracomm, name: str, node_of: NodeOf | None = None) -> MpiCommunicator:
    """A communicator whose ranks are on these nodes; None for those that share memory."""
    nodes.ranks_of_node = sharing_memory
    if node_of is not None:
        nodes.ranks_of_node = lambda ranks: ranks.Split(node_of(WORLD.rank), key=ranks.rank)
    return MpiCommunicator(world, name)


def fill(buffer: torch.Tensor, rank: int, step: int) -> None:
    """Integers of at most 18, whose sums over four ranks even bfloat16 holds."""
    buffer.copy_(torch.arange(len(buffer), dtype=torch.int64).add_(3 * step).remainder_(16).add_(rank))


def expected(numel: int, ranks: int, step: int) -> np.ndarray:
    return (np.arange(numel) + 3 * step) % 16 + (ranks - 1) / 2


def check_equal_bits(comm: MpiCommunicator, buffer: torch.Tensor) -> str:
    digest = hashlib.sha256(buffer.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert len(set(comm.allgather_object(digest))) == 1, "the ranks hold different bits"
    return digest


def check_mean(comm: MpiCommunicator, numel: int, dtype: torch.dtype, wire: torch.dtype | None, shared: bool) -> None:
    engine = comm.torch()
    buffer = engine.allocate(numel, dtype, CPU) if shared else torch.empty(numel, dtype=dtype)
    for step in range(2):
        fill(buffer, comm.rank, step)
        before = comm._reducer.sent_bytes
        engine.allreduce(buffer, f"{numel} of {dtype}", wire).wait()
        wanted = expected(numel, comm.size, step)
        if comm.size == 4:
            np.testing.assert_array_equal(buffer.double().numpy(), wanted)
        else:
            # a third is no binary number: rounded as often as there are ranks, and once more
            np.testing.assert_allclose(
                buffer.double().numpy(), wanted, rtol=4 * float(torch.finfo(wire or dtype).eps), atol=0
            )
        check_equal_bits(comm, buffer)
        node = comm._reducer.node
        sent = sum(comm.allgather_object(comm._reducer.sent_bytes - before))
        # what a ring sends: each element passes each node but the last twice
        assert sent == 2 * (node.count - 1) * numel * (wire or dtype).itemsize, f"{sent} bytes left the nodes"


def check_same_bits_every_time(comm: MpiCommunicator, dtype: torch.dtype, wire: torch.dtype | None) -> None:
    """Numbers whose sum depends on the order of the terms, and ranks that come at other times."""
    engine = comm.torch()
    for numel in (1000, 200_003):
        random = np.random.default_rng((comm.rank, numel))
        values = torch.from_numpy(random.normal(size=numel) * 10.0 ** random.integers(-3, 4, numel)).to(dtype)
        mean = np.mean([part.double().numpy() for part in comm.allgather_object(values)], axis=0)
        buffer = engine.allocate(numel, dtype, CPU)
        digests = set()
        for turn in range(3):
            buffer.copy_(values)
            time.sleep(0.002 * ((comm.rank + turn) % 3))
            engine.allreduce(buffer, f"random {numel}", wire).wait()
            digests.add(check_equal_bits(comm, buffer))
        assert len(digests) == 1, "the bits depend on the time"
        eps = float(torch.finfo(wire or dtype).eps)
        assert np.abs(buffer.double().numpy() - mean).max() < 8 * eps * 5000


def check_layouts() -> None:
    for name, (ranks, node_of) in LAYOUTS.items():
        world = WORLD.Split(0 if WORLD.rank < ranks else 1, key=WORLD.rank)
        if WORLD.rank < ranks:
            os.environ["OMP_NUM_THREADS"] = "3" if name == "two nodes" else "1"
            comm = communicator(world, name, node_of)
            node = comm._reducer.node
            assert comm.bucket_bytes == (25e6 if node.count == 1 or node.rdma else 4e6)
            for dtype, wire in TYPES:
                for numel in SIZES:
                    check_mean(comm, numel, dtype, wire, shared=numel != 4097)
                check_same_bits_every_time(comm, dtype, wire)
            comm.shutdown()
        world.Free()


def check_large_values() -> None:
    """The mean of what float16 holds is something that float16 holds, though the sum is not."""
    for node_of in (None, lambda rank: rank // 2):
        comm = communicator(WORLD, "large values", node_of)
        buffer = comm.torch().allocate(100, torch.float16, CPU).fill_(60000)
        comm.torch().allreduce(buffer, "large").wait()
        assert (buffer == 60000).all()
        comm.shutdown()


def check_stale_reads() -> None:
    """Data that change each time, read as soon as the ranks met: an old value anywhere is a wrong one."""
    comm = communicator(WORLD, "stale")
    node, pause = comm._reducer.node, comm._reducer.worker.pause
    segment = Segment(node, 8 * 512, comm.timeout)
    numbers = [view.view(np.int64) for view in segment.views]
    for step in range(2000):
        numbers[comm.rank][:] = step * comm.size + comm.rank
        segment.barrier("test", pause)
        for rank, theirs in enumerate(numbers):
            assert (theirs == step * comm.size + rank).all(), f"rank {comm.rank} read rank {rank}'s old data"
        segment.barrier("test", pause)
    segment.free()
    engine = comm.torch()
    buffers = [engine.allocate(numel, torch.float32, CPU) for numel in (250, 30_000)]
    # one barrier with slots in turn; two barriers; both by turns
    for chosen in (buffers[:1], buffers[1:], buffers):
        for step in range(1000):
            for buffer in chosen:
                buffer.fill_(step * comm.size + comm.rank)
                engine.allreduce(buffer, f"stale {len(buffer)}").wait()
                assert (buffer == step * comm.size + (comm.size - 1) / 2).all(), f"old data in step {step}"
    comm.shutdown()


def check_order() -> None:
    """Small, middling and large ones are reduced in the order of their submission, whoever runs them."""
    comm = communicator(WORLD, "order", lambda rank: rank // 2)
    engine = comm.torch()
    buffers = [engine.allocate(numel, torch.float32, CPU) for numel in (700_000, 10, 50_000, 300_000, 1000)]
    for step in range(20):
        works = []
        for index, buffer in enumerate(buffers):
            fill(buffer, comm.rank, step)
            works.append(engine.allreduce(buffer, f"order {index}"))
            time.sleep(0.0005 * ((comm.rank * 7 + index + step) % 3))
        for index in (2, 0, 4, 1, 3):
            works[index].wait()
        for buffer in buffers:
            np.testing.assert_array_equal(buffer.numpy(), expected(len(buffer), comm.size, step))
    comm.shutdown()


def check_overlap() -> None:
    """A large buffer is reduced although nobody waits for it."""
    comm = communicator(WORLD, "overlap")
    engine = comm.torch()
    before, buffer = (engine.allocate(numel, torch.float32, CPU) for numel in (50_000, 1_000_000))
    fill(buffer, comm.rank, 0)
    # it alone wakes nobody up
    engine.allreduce(before, "before it")
    work = engine.allreduce(buffer, "overlap")
    end = time.monotonic() + 100
    while not work.done:
        assert time.monotonic() < end, "nobody reduced it"
        time.sleep(0.001)
    np.testing.assert_array_equal(buffer.numpy(), expected(len(buffer), comm.size, 0))
    comm.shutdown()


def check_one_thread() -> None:
    """An MPI that must not be called by two threads: whoever waits does it all."""
    with mock.patch.object(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED):
        comm = communicator(WORLD, "one thread", lambda rank: rank // 2)
    assert "hpctrain-worker" not in [thread.name for thread in threading.enumerate()]
    check_mean(comm, 1_000_000, torch.float32, None, shared=True)
    comm.shutdown()


def check_different_buffers() -> None:
    """Ranks that submit different buffers are told so, all of them, and nothing hangs after that."""
    comm = communicator(WORLD, "different")
    engine = comm.torch()
    buffer = engine.allocate(100, torch.float32, CPU)
    own = buffer[: 50 if comm.rank == 2 else 100]
    for work in (engine.allreduce(own, "gradients.0"), engine.allreduce(buffer, "gradients.1")):
        found = refused(work.wait, "HT-ranks-reduce-differently", rank=2, first_rank=0)["values"]
        assert found["other"].split()[:2] == ["'gradients.0'", "(200"], found
    comm.shutdown()


def check_different_copies() -> None:
    """The same of tensors that are not the engine's: said before memory is made for them, after what is queued."""
    comm = communicator(WORLD, "different copies")
    engine = comm.torch()
    queued = engine.allocate(700_000, torch.float32, CPU)
    fill(queued, comm.rank, 0)
    engine.allreduce(queued, "queued")
    foreign = torch.zeros(50 if comm.rank == 2 else 100)
    found = refused(lambda: engine.allreduce(foreign, "foreign"), "HT-ranks-reduce-differently", rank=2, first_rank=0)
    assert found["values"]["other"].split()[:2] == ["'foreign'", "(200"], found
    np.testing.assert_array_equal(queued.numpy(), expected(len(queued), comm.size, 0))
    on_device = torch.empty(10, device="meta")
    for call in (
        lambda: engine.allocate(10, torch.float32, on_device.device),
        lambda: engine.broadcast(on_device, "device"),
        lambda: engine.allgather(on_device, "device"),
    ):
        refused(call, "HT-backend-wrong-device", device="meta")
    comm.shutdown()


def network(comm: MpiCommunicator) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)


def backward(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """The last bias's gradient is the mean of rank + 1."""
    (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
    return model[1].bias.grad


def check_gradients_after_shutdown() -> None:
    comm = communicator(WORLD, "after shutdown")
    model, _ = network(comm)
    assert float(backward(model, comm.rank)) == (comm.size + 1) / 2
    values = [parameter.grad.clone() for parameter in model.parameters()]
    comm.shutdown()
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter.grad, value)
        parameter.grad.fill_(1.0)
    refused(lambda: backward(model, 0), "HT-reduction-after-shutdown")
    check_reductions_after_shutdown()


def check_reductions_after_shutdown() -> None:
    """Also of tensors that are not the engine's own, as TensorFlow's: they were copied to memory that is gone."""
    comm = communicator(WORLD, "after shutdown")
    engine = comm.torch()
    foreign, own = torch.ones(100_000), engine.allocate(30_000, torch.float32, CPU)
    calls: list[Callable[[], object]] = [
        lambda: engine.allreduce(foreign, "foreign").wait(),
        lambda: engine.allreduce(own, "own").wait(),
        lambda: engine.allocate(10, torch.float32, CPU),
    ]
    for call in calls:
        call()
    comm.shutdown()
    for call in calls:
        refused(call, "HT-reduction-after-shutdown")


def check_rebuild() -> None:
    """Three of four ranks go on; the fourth does not take part, as if it had died."""
    comm = communicator(WORLD, "rebuild", lambda rank: rank // 2)
    engine = comm.torch()
    model, optimizer = network(comm)
    assert float(backward(model, comm.rank)) == 2.5
    old = engine.allocate(30_000, torch.float32, CPU)
    engine.allreduce(old, "before").wait()
    left = WORLD.Split(0 if comm.rank < 3 else MPI.UNDEFINED, key=comm.rank)
    if comm.rank < 3:
        # as an error in a backward pass leaves it; and a reduction that waits for its turn
        statistics(model)._running = True
        abandoned = engine.allreduce(old, "before")
        comm._reducer.rebuild(left)
        comm._comm, comm.rank, comm.size = left, left.rank, left.size
        refused(abandoned.wait, "HT-reduction-interrupted")
        statistics(model).rebuild()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert float(backward(model, comm.rank)) == 2.0
        optimizer.step()
        for buffer in (engine.allocate(1000, torch.float32, CPU), torch.empty(30_000)):
            fill(buffer, comm.rank, 0)
            engine.allreduce(buffer, "after").wait()
            np.testing.assert_allclose(buffer.numpy(), expected(len(buffer), 3, 0), rtol=1e-6)
    WORLD.Barrier()
    comm._reducer.close()


def check_cycles() -> None:
    """A hundred times init and shutdown: threads, files, mappings and shared memory as before."""

    shared = Path(os.environ["SHARED_FILES"])

    def used() -> dict[str, int]:
        own = Path("/proc/self")
        return {
            "threads": len(list((own / "task").iterdir())),
            "files": len(list((own / "fd").iterdir())),
            "mappings": len((own / "maps").read_text().splitlines()),
            "shared memory files": len(list(shared.iterdir())),
            "resident pages": int((own / "statm").read_text().split()[1]),
        }

    def cycle() -> None:
        comm = communicator(WORLD, "cycle", lambda rank: rank // 2)
        model, _ = network(comm)
        backward(model, comm.rank)
        buffer = comm.torch().allocate(500_000, torch.float32, CPU).fill_(1)
        comm.torch().allreduce(buffer, "cycle").wait()
        comm.shutdown()
        comm.shutdown()

    for _ in range(20):
        cycle()
    WORLD.Barrier()
    before = used()
    for _ in range(100):
        cycle()
    WORLD.Barrier()
    # 100 buffers of 2 MB would be 50000 pages, and 100 threads 100: what libraries start or allocate once is no leak
    slack = {"threads": 1, "mappings": 40, "resident pages": 2500}

    def grown() -> dict[str, tuple[int, int]]:
        after = used()
        return {what: (before[what], after[what]) for what in before if after[what] > before[what] + slack.get(what, 0)}

    # A thread that has been joined is on the kernel's list for a moment longer.
    deadline = time.monotonic() + 60
    while grown() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grown(), grown()


def check_crash() -> None:
    """An exception in the middle of everything; the test looks at what is left."""
    import hpctrain as ht

    comm = ht.init("mpi")
    buffer = comm.torch().allocate(1_000_000, torch.float32, CPU)
    comm.torch().allreduce(buffer, "crash")
    if comm.rank == 1:
        raise ValueError("this rank only")
    if comm.rank == 2:
        comm.barrier()
    comm.torch().allreduce(buffer, "crash").wait()


def check_exit() -> None:
    """A script that ends without a word: shutdown runs by itself."""
    import hpctrain as ht

    comm = ht.init("mpi")
    buffer = comm.torch().allocate(1_000_000, torch.float32, CPU)
    comm.torch().allreduce(buffer, "exit")


if __name__ == "__main__":
    print(f"on {MPI.get_vendor()[0]}", flush=True)
    for check in sys.argv[1:]:
        globals()[f"check_{check}"]()
        print(f"{check} agrees", flush=True)
