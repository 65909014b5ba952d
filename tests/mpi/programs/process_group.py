"""torch.distributed's process group "hpctrain" on several arrangements of ranks into nodes.

``python process_group.py CHECK …`` runs these checks; each prints one line a rank. Every rank knows what all ranks
have, so that each result is compared with what NumPy makes of it. Ranks that all share memory stand for several nodes,
because the engine is told which of them belong together.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import mpi_engine
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from situations import refusal, refused

WORLD = MPI.COMM_WORLD
# Nothing, less than a cache line, more than all that is added up at once, and several turns of the shared memory.
SIZES = (0, 1, 17, 5_003, 300_001)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
OTHERS = (torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
# On every layout; and the types, which know nothing of it, where all ranks share memory and where some do.
LENGTHS = tuple((numel, torch.float32) for numel in SIZES)
CASES = (
    *LENGTHS,
    *((5_003, dtype) for dtype in (*FLOATS, *INTEGERS, *OTHERS)),
    (300_001, torch.bfloat16),
)
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
LAYOUTS = {**mpi_engine.LAYOUTS, "one rank": (1, None)}
Array = np.ndarray


@contextmanager
def ranks_on(layout: str) -> Iterator[bool]:
    """The default group over the ranks of a layout; False on ranks that are left over."""
    ranks, node_of = LAYOUTS[layout]
    world = WORLD.Split(0 if WORLD.rank < ranks else 1, key=WORLD.rank)
    taking_part = WORLD.rank < ranks
    if taking_part:
        comm = mpi_engine.communicator(world, layout, node_of)
        comm.process_group()
        comm.process_group()
        assert dist.get_backend() == "hpctrain"
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
        yield True
        comm.shutdown()
        assert not dist.is_initialized()
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    else:
        yield False
    world.Free()


def values(rank: int, numel: int, salt: int = 0, most: int = 11) -> Array:
    """Small integers, whose sums and products over four ranks every type holds, if ``most`` is 3 for products."""
    return ((np.arange(numel) * 7 + 13 * rank + salt) % most).astype(np.float64)


def tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(dtype)


def same(found: torch.Tensor, wanted: Array) -> None:
    plain = found.float() if found.dtype.itemsize == 1 and found.dtype.is_floating_point else found
    np.testing.assert_array_equal(plain.to(torch.complex128 if plain.is_complex() else torch.float64).numpy(), wanted)


def as_type(array: Array, dtype: torch.dtype) -> Array:
    return (array != 0).astype(np.float64) if dtype == torch.bool else array


def check_gathers(dtype: torch.dtype, numel: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = tensor(values(rank, numel), dtype)
    everyone = np.concatenate([as_type(values(r, numel), dtype) for r in range(size)])
    joined = torch.empty(size * numel, dtype=dtype)
    dist.all_gather_single(joined, own)
    same(joined, everyone)
    # as FSDP does it: the own part lies in its place
    joined = torch.empty(size * numel, dtype=dtype)
    part = joined.narrow(0, rank * numel, numel)
    part.copy_(own)
    dist.all_gather_single(joined, part)
    same(joined, everyone)
    # of different lengths
    parts = [torch.empty(numel + r, dtype=dtype) for r in range(size)]
    dist.all_gather(parts, tensor(values(rank, numel + rank), dtype))
    for r, found in enumerate(parts):
        same(found, as_type(values(r, numel + r), dtype))
    for root in range(size):
        sent = tensor(values(rank, numel, salt=root), dtype)
        dist.broadcast(sent, root)
        same(sent, as_type(values(root, numel, salt=root), dtype))
    root = size - 1
    parts = [torch.empty(numel, dtype=dtype) for _ in range(size)] if rank == root else None
    dist.gather(own, parts, root)
    for r, found in enumerate(parts or []):
        same(found, as_type(values(r, numel), dtype))
    got = torch.empty(numel, dtype=dtype)
    given = [tensor(values(rank, numel, salt=5 * r), dtype) for r in range(size)] if rank == root else None
    dist.scatter(got, given, root)
    same(got, as_type(values(root, numel, salt=5 * rank), dtype))


def check_exchanges(dtype: torch.dtype, numel: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.empty(size * numel, dtype=dtype)
    dist.all_to_all_single(got, tensor(np.concatenate([values(rank, numel, salt=r) for r in range(size)]), dtype))
    same(got, as_type(np.concatenate([values(r, numel, salt=rank) for r in range(size)]), dtype))
    # rows of three, another number to each, and none to some

    def rows(sender: int, receiver: int) -> int:
        return 0 if (sender + receiver) % 3 == 2 else numel // 7 + sender + 2 * receiver

    given = [rows(rank, r) for r in range(size)]
    taken = [rows(r, rank) for r in range(size)]
    sent = np.concatenate([values(rank, 3 * n, salt=r).reshape(-1, 3) for r, n in enumerate(given)])
    found = torch.empty(sum(taken), 3, dtype=dtype)
    dist.all_to_all_single(found, tensor(sent, dtype), taken, given)
    wanted = np.concatenate([values(r, 3 * n, salt=rank).reshape(-1, 3) for r, n in enumerate(taken)])
    same(found, as_type(wanted, dtype))
    outputs = [torch.empty(n, dtype=dtype) for n in taken]
    dist.all_to_all(outputs, [tensor(values(rank, n, salt=r), dtype) for r, n in enumerate(given)])
    for r, found in enumerate(outputs):
        same(found, as_type(values(r, taken[r], salt=rank), dtype))


def reduced(terms: list[Array], operation: str, dtype: torch.dtype) -> Array:
    stacked = np.stack(terms)
    by_name = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    found = by_name[operation](stacked, axis=0)
    return np.trunc(found) if dtype in INTEGERS else found


def check_reductions(dtype: torch.dtype, numel: int, operation: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    most = 3 if operation == "PRODUCT" else 11
    op = getattr(dist.ReduceOp, operation)
    # of a third only twice as many bits are known as the type has
    close = operation == "AVG" and size == 3 and dtype in FLOATS

    def agree(found: torch.Tensor, wanted: Array) -> None:
        if not close:
            same(found, wanted)
            return
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=float(torch.finfo(dtype).eps), atol=0)

    own = tensor(values(rank, numel, most=most), dtype)
    wanted = reduced([values(r, numel, most=most) for r in range(size)], operation, dtype)
    found = own.clone()
    dist.all_reduce(found, op)
    agree(found, wanted)
    root = size // 2
    found = own.clone()
    dist.reduce(found, root, op)
    agree(found, wanted if rank == root else values(rank, numel, most=most))
    # a part for each, and then parts of different lengths
    source = tensor(np.concatenate([values(rank, numel, r, most) for r in range(size)]), dtype)
    part = torch.empty(numel, dtype=dtype)
    dist.reduce_scatter_single(part, source, op)
    agree(part, reduced([values(r, numel, rank, most) for r in range(size)], operation, dtype))
    part = torch.empty(numel + rank, dtype=dtype)
    dist.reduce_scatter(part, [tensor(values(rank, numel + r, r, most), dtype) for r in range(size)], op)
    agree(part, reduced([values(r, numel + rank, rank, most) for r in range(size)], operation, dtype))


def check_other_operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (5, 40_000):
        numbers = [(np.arange(numel) * 5 + 3 * r) % 64 for r in range(size)]
        for name, operation in (("BAND", np.bitwise_and), ("BOR", np.bitwise_or), ("BXOR", np.bitwise_xor)):
            found = torch.from_numpy(numbers[rank].copy())
            dist.all_reduce(found, getattr(dist.ReduceOp, name))
            same(found, operation.reduce(numbers))
        found = tensor(values(rank, numel), torch.float32)
        dist.all_reduce(found, dist.ReduceOp.PREMUL_SUM(0.25))
        same(found, sum(values(r, numel) for r in range(size)) / 4)
        for dtype in (torch.bool, torch.complex64):
            found = tensor(values(rank, numel), dtype)
            dist.all_reduce(found)
            total = sum(as_type(values(r, numel), dtype) for r in range(size))
            same(found, as_type(total, dtype))


def check_shapes() -> None:
    """Tensors that are not contiguous, of no dimension, and of other formats; coalesced ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = tensor(values(rank, 60_000).reshape(200, 300), torch.float64)
    wanted = sum(values(r, 60_000).reshape(200, 300) for r in range(size))
    for view in (lambda t: t.t(), lambda t: t[::2, 1::3], lambda t: t.view(10, 20, 15, 20).transpose(1, 3)):
        found = whole.clone()
        dist.all_reduce(view(found))
        same(view(found), view(torch.from_numpy(wanted)).numpy())
        got = view(torch.empty_like(whole))
        got.copy_(view(whole))
        dist.broadcast(got, 0)
        same(got, view(torch.from_numpy(values(0, 60_000).reshape(200, 300))).numpy())
    # what lies between the elements of a view is nobody else's
    found = torch.zeros(10, 10)
    dist.all_reduce(found[:, ::2].fill_(1.0))
    same(found, np.tile([size, 0], (10, 5)))
    target = torch.empty(3, size).t()
    dist.all_gather_single(target, torch.full((1, 6), float(rank))[:, ::2])
    same(target, np.repeat(np.arange(size), 3).reshape(size, 3))
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    assert number.item() == size * (size + 1) / 2
    with torch.no_grad():
        parameter = torch.nn.Parameter(torch.ones(5))
        dist.all_reduce(parameter)
    assert parameter.requires_grad
    same(parameter.detach(), np.full(5, size))
    with dist._coalescing_manager():
        several = [torch.full((n,), float(rank)) for n in (1, 0, 30_000)]
        for each in several:
            dist.all_reduce(each)
    for each in several:
        same(each, np.full(len(each), size * (size - 1) / 2))
    with dist._coalescing_manager(async_ops=True) as manager:
        joined = [torch.empty(size * n) for n in (2, 5_000)]
        for each in joined:
            dist.all_gather_single(each, torch.full((len(each) // size,), float(rank)))
    manager.wait()
    for each in joined:
        same(each, np.repeat(np.arange(size), len(each) // size))


def check_messages() -> None:
    """Any number in flight, with tags that come in another order; a batch; a column; from any source."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        for numel in SIZES:
            count = 4
            works = [dist.isend(tensor(values(rank, numel, salt=t), dtype), ahead, tag=t) for t in range(count)]
            got = [torch.empty(numel, dtype=dtype) for _ in range(count)]
            works += [dist.irecv(got[t], behind, tag=t) for t in reversed(range(count))]
            for work in works:
                work.wait()
                assert work.is_completed()
            for t, found in enumerate(got):
                same(found, as_type(values(behind, numel, salt=t), dtype))
    # a column of a matrix
    matrix = torch.zeros(5, 3)
    operations = [
        dist.P2POp(dist.irecv, matrix[:, 1], behind),
        dist.P2POp(dist.isend, torch.full((5, 2), float(rank))[:, 0], ahead),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(matrix, np.outer(np.full(5, behind), [0, 1, 0]))
    if size > 1:
        if rank == 0:
            sources = set()
            for _ in range(size - 1):
                found = torch.empty(1)
                source = dist.recv(found, tag=9)
                assert found.item() == source
                sources.add(source)
            assert sources == set(range(1, size))
        else:
            dist.send(torch.tensor([float(rank)]), 0, tag=9)


def check_in_flight() -> None:
    """Many at once, waited for in another order; and they go on while nobody waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    several = [tensor(values(rank, n, salt=n), torch.float64) for n in (10, 200_000, 3, 50_000)]
    works = [dist.all_reduce(each, async_op=True) for each in several]
    joined = torch.empty(size * 1000)
    works.append(dist.all_gather_single(joined, torch.full((1000,), float(rank)), async_op=True))
    deadline = time.monotonic() + 60
    while not works[-1].is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for work in reversed(works):
        work.wait()
    for each, n in zip(several, (10, 200_000, 3, 50_000), strict=True):
        same(each, sum(values(r, n, salt=n) for r in range(size)))
    same(joined, np.repeat(np.arange(size), 1000))
    work = dist.all_reduce(several[0], async_op=True)
    assert work.get_future().wait()[0] is not None
    same(several[0], size * sum(values(r, 10, salt=10) for r in range(size)))
    # one that is waited for runs after those before it
    first = torch.ones(100_000)
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(first)
    work.wait()
    same(first, np.full(100_000, size * size))


def check_two_groups() -> None:
    """Groups that share ranks, whose collectives each rank starts and waits for in an order of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(list(range(size)))
    neighbours = [dist.new_group([r, (r + 1) % size]) for r in range(size)] if size > 2 else []
    numel = 50_000
    for turn in range(5):
        mine = {
            r: torch.full((numel,), float(rank + turn)) for r in range(len(neighbours)) if rank in (r, (r + 1) % size)
        }
        order = sorted(mine, reverse=bool((rank + turn) % 2))
        works = [dist.all_reduce(mine[r], group=neighbours[r], async_op=True) for r in order]
        total = torch.full((numel,), float(rank))
        if turn % 2:
            works.append(dist.all_reduce(total, group=everyone, async_op=True))
        else:
            dist.all_reduce(total, group=everyone)
        for work in reversed(works):
            work.wait()
        same(total, np.full(numel, size * (size - 1) / 2))
        for r, found in mine.items():
            same(found, np.full(numel, r + (r + 1) % size + 2 * turn))
    # ranks in groups have other numbers
    if size == 4:
        pair = dist.new_group([1, 3])
        if rank in (1, 3):
            found = torch.full((7,), float(rank))
            dist.broadcast(found, 3, group=pair)
            same(found, np.full(7, 3))
            message = torch.tensor([float(rank)])
            if rank == 1:
                dist.send(message, 3, group=pair)
            else:
                dist.recv(message, 1, group=pair)
            assert message.item() == 1
            dist.barrier(group=pair)
            dist.destroy_process_group(pair)


def check_layouts() -> None:
    for name in LAYOUTS:
        if os.environ.get("ONLY", name) != name:
            continue
        with ranks_on(name) as taking_part:
            if not taking_part:
                continue
            for numel, dtype in CASES if name in ("one node", "one rank, two, and one") else LENGTHS:
                check_gathers(dtype, numel)
                check_exchanges(dtype, numel)
                for operation in OPERATIONS:
                    if dtype in (*FLOATS, *INTEGERS):
                        check_reductions(dtype, numel, operation)
            check_other_operations()
            check_shapes()
            check_messages()
            check_in_flight()
            check_two_groups()
            print(f"on {name}: all agree", flush=True)


def check_misuse() -> None:
    with ranks_on("one node"):
        ones = torch.ones(4)
        meta = torch.ones(4, device="meta")
        refused(lambda: dist.all_reduce(meta), "HT-group-bad-argument", call="all_reduce", device="meta")
        wrong = {"call": "all_gather_single", "found": 15, "wanted": 16}
        refused(lambda: dist.all_gather_single(torch.empty(15), ones), "HT-group-bad-argument", **wrong)
        uneven = torch.empty(5)
        refused(lambda: dist.all_to_all_single(uneven, uneven), "HT-group-bad-argument", length=5)
        # a mistake that is noticed before anything is sent costs nothing
        dist.all_reduce(ones)
        same(ones, np.full(4, 4))


def check_different_calls() -> None:
    """Every rank hears of it, in what it waits for and in all that comes after."""
    world = WORLD.Dup()
    comm = mpi_engine.communicator(world, "different calls")
    comm.process_group()
    sizes = (100, 100, 100, 200)
    dist.all_reduce(torch.ones(100))
    heard = refusal(lambda: dist.all_reduce(torch.ones(sizes[comm.rank])))
    if comm.rank == 3:
        assert heard is not None and heard["code"] == "HT-ranks-in-different-calls", heard
        assert {re.findall("[0-9]+", heard["values"][each])[0] for each in ("call", "other")} == {"100", "200"}, heard
    # the others hear it at the latest when they meet those that have given up
    assert len([each for each in comm.allgather_object(heard) if each]) == 4
    comm.shutdown()


def check_stall() -> None:
    """Rank 2 does not come to a collective of its group; the others say so and end."""
    import hpctrain as ht

    comm = ht.init("mpi")
    comm.process_group()
    group = dist.new_group([1, 2])
    found = torch.ones(50_000)
    if comm.rank == 2:
        time.sleep(600)
    if comm.rank == 1:
        dist.all_reduce(found, group=group)
    time.sleep(600)


def run(check: str) -> None:
    """Without ``ht.init`` nobody else ends the other ranks when one fails."""
    try:
        globals()[f"check_{check}"]()
    except Exception:
        if "hpctrain" in sys.excepthook.__module__:
            raise
        traceback.print_exc()
        WORLD.Abort(1)
    print(f"{check} agrees", flush=True)


if __name__ == "__main__":
    for check in sys.argv[1:]:
        run(check)
