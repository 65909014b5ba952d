"""Rank 0 forks; prints what each fork has left behind at its end. ``fork_ends.py FOLDER``"""

# ruff: noqa: SIM115 (what a fork leaves open is what is tried)

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import hpctrain as ht

_FOLDER = Path(sys.argv[1])
kept: list[object] = []


class Finalized:
    """Something with a finalizer."""


def fork(work: Callable[[], object]) -> int:
    """The exit status of a fork that does this work and then leaves."""
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forks_temporary() -> None:
    kept.append(tempfile.TemporaryDirectory(prefix="forks-", dir=_FOLDER))
    kept.append(Finalized())
    weakref.finalize(kept[-1], (_FOLDER / "finalized").touch)


def write() -> None:
    text, packed, raw = (_FOLDER / "text").open("w"), gzip.open(_FOLDER / "packed", "wt"), (_FOLDER / "raw").open("wb")
    kept.extend((text, packed, raw))
    text.write("of the fork")
    packed.write("of the fork")
    raw.write(b"of the fork")


def submit(pool: ThreadPoolExecutor) -> None:
    kept.extend((pool, pool.submit((_FOLDER / "threads").touch)))


def fork_beside_a_folder() -> int:
    """1 where a fork that gives up a temporary folder of its parent's has removed it."""
    parents = tempfile.TemporaryDirectory(prefix="local-", dir=_FOLDER)
    name = parents.name

    def give_up() -> None:
        nonlocal parents
        del parents

    return fork(give_up) or int(not Path(name).is_dir())


def read(name: str) -> str:
    return (_FOLDER / name).read_text()


def start_init() -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=ht.init)
    process.start()
    process.join()
    return process.exitcode


def main() -> None:
    forking = multiprocessing.get_context("fork")
    parents = tempfile.TemporaryDirectory(prefix="parents-", dir=_FOLDER)
    unwritten = (_FOLDER / "parents").open("w")
    unwritten.write("of the parent")
    print("printed once", end=" ")
    pool = ProcessPoolExecutor(1, mp_context=forking)
    pool.submit(abs, -1).result()
    statuses = {
        "temporary": fork(forks_temporary),
        "write": fork(write),
        "threads": fork(lambda: submit(ThreadPoolExecutor(1))),
        "local": fork_beside_a_folder(),
    }
    found = {
        "statuses": statuses,
        "parent's folder": Path(parents.name).is_dir(),
        "forks' folders": [each.name for each in _FOLDER.glob("forks-*")],
        "made": sorted(name for name in ("finalized", "threads") if (_FOLDER / name).exists()),
        "files": [read("text"), read("raw"), gzip.decompress((_FOLDER / "packed").read_bytes()).decode()],
        "parent's pool": pool.submit(abs, -1).result(),
        "spawned": start_init(),
    }
    unwritten.close()
    found["parent's file"] = read("parents")
    print("\nended", json.dumps(found), flush=True)


if __name__ == "__main__":
    signal.alarm(100)
    comm = ht.init()
    if comm.rank == 0:
        main()
    comm.barrier()
