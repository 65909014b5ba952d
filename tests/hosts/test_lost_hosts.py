"""A host whose cable is cut says no goodbye: the others go on without it in time, and nothing trains on there."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.common.run.events import read_events
from support.hosts.local_hosts import LocalHosts
from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")

_TIMEOUT = 8
# The folder is a control group of the kernel's, with 64 MB.
TOO_MUCH = """\
import pathlib, sys
import hpctrain as ht
comm = ht.init("mpi")
if comm.rank == 1:
    pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
    bytearray(range(256)) * (1 << 20)
comm.barrier()
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, of whichever version there is."""
    old = Path("/sys/fs/cgroup/memory")
    folder = (old if old.exists() else old.parent) / f"hpctrain-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (folder / ("memory.limit_in_bytes" if old.exists() else "memory.max")).write_text("64M")
        # Not every kernel has a limit for what is swapped out.
        with contextlib.suppress(OSError):
            swap, most = ("memory.memsw.limit_in_bytes", "64M") if old.exists() else ("memory.swap.max", "0")
            (folder / swap).write_text(most)
        yield folder
    except OSError as error:
        pytest.skip(f"a control group here has no limit of memory: {error}")
    finally:
        folder.rmdir()


def _wait(what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(0.1)


@pytest.mark.long
def test_a_run_goes_on_without_a_host_whose_cable_was_cut(hosts: LocalHosts, tmp_path: Path):
    arguments = ("digits", "-H", "h1,h2,h3", "--backend", "mpi", "--set", "epochs=2", "--run-dir", "run")
    command = hosts.command("h1", "hpctrain", "run", *arguments, cwd=tmp_path, HPCTRAIN_HOST_TIMEOUT=str(_TIMEOUT))
    path = tmp_path / "run" / "events.jsonl"

    def happened(kind: str) -> int:
        return sum(event.event == kind for event in read_events(path)) if path.exists() else 0

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            _wait("the first epoch is saved", lambda: happened("checkpoint") > 0)
            hosts.cut("h3")
            begin = time.monotonic()
            _wait("h3 is missed", lambda: happened("fault") > 0)
            assert time.monotonic() - begin > _TIMEOUT / 2
            # On h3 they are on their own, and know it.
            ranks = ("pgrep", "-f", "hpctrain.worker.train")
            _wait("nothing trains on h3", lambda: not hosts.run("h3", *ranks, check=False).stdout)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert re.search(r"host h3 .*; .* 23 with 2 of 3 ranks on h\[1-2\]", said)
    assert [event.hosts for event in read_events(path) if event.event == "run"] == [("h1", "h2", "h3"), ("h1", "h2")]


@pytest.mark.long
def test_a_rank_for_which_memory_ran_out_on_another_host_is_named(hosts_hpctrain: Launch, tmp_path, small_group):
    (tmp_path / "big.py").write_text(TOO_MUCH)
    done = hosts_hpctrain("run", "big.py", "-H", "h1,h2", "--run-dir", "run", "--", str(small_group))
    assert codes(done.stdout) == ["HT-rank-out-of-memory"] and "rank 1 on h2" in done.stdout, done.stdout
