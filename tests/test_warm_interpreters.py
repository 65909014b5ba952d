"""A rank in a warm interpreter is what it would be in one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support import launching
from support.startup import warm_start

pytest.importorskip("torch")

LIMIT = 120


@pytest.fixture
def start(tmp_path):
    """``start(program, *arguments, **variables)``: a process whose pipes are open."""
    started = []

    def start(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text("import sys\nwarm = 'torch' in sys.modules\nimport torch\n" + textwrap.dedent(program))
        environment = {**os.environ, **warm_start.READ_AT_IMPORT, **variables}
        command = [sys.executable, str(script), *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=tmp_path
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_gets_all_that_its_process_has(start, tmp_path):
    (tmp_path / "beside.py").write_text("value = 3")
    process = start(
        """
        import beside, json, os, tempfile
        print(json.dumps({
            "warm": warm, "argv": sys.argv[1:], "cwd": os.getcwd(), "own": os.environ["OWN"], "read": input(),
            "beside": beside.value, "name": __name__, "main": sys.modules["__main__"].warm, "own process": os.getpid(),
            "cores": sorted(os.sched_getaffinity(0)), "is leader": os.getpgrp() == os.getpid(),
            "seed": os.environ.get("PYTHONHASHSEED"), "temporary": tempfile.gettempdir(),
            "threads": torch.get_num_threads(),
        }))
        print("said", file=sys.stderr)
        sys.exit(7)
        """,
        "a",
        "b c",
        OWN="value",
        TMPDIR=str(tmp_path),
        OMP_NUM_THREADS="3",
    )
    out, err = process.communicate("a line\n", timeout=LIMIT)
    seen = json.loads(out)
    assert seen.pop("own process") != process.pid
    assert seen == {
        "warm": True,
        "argv": ["a", "b c"],
        "cwd": str(tmp_path),
        "own": "value",
        "read": "a line",
        "beside": 3,
        "name": "__main__",
        "main": True,
        "cores": sorted(os.sched_getaffinity(0)),
        "is leader": True,
        "seed": None,
        "temporary": str(tmp_path),
        "threads": 3,
    }
    assert err == "said\n"
    assert process.returncode == 7


@pytest.mark.parametrize(
    "variables", [{"OMP_NUM_THREADS": "3,2"}, {"PYTHONHASHSEED": "5"}, {"LD_LIBRARY_PATH": "/lib"}]
)
def test_what_differs_before_the_imports_begins_cold(start, variables):
    out, _ = start("print(warm)", **variables).communicate(timeout=LIMIT)
    assert out == "False\n"


@pytest.mark.long
def test_no_state_goes_from_one_to_the_next_and_ranks_side_by_side_hash_differently(start):
    program = "print(torch.rand(3), hasattr(torch, 'left')); torch.left = 1; print(hash('a'))"
    outs = [start(program, OMPI_COMM_WORLD_RANK=str(rank)).communicate(timeout=LIMIT)[0] for rank in (0, 0, 1)]
    drawn, hashes = zip(*(out.splitlines() for out in outs), strict=True)
    assert len({*drawn}) == 3 and all(line.endswith("False") for line in drawn)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise ValueError('told')", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os._exit(3)", 3),
    ],
)
def test_the_process_ends_as_the_rank_did(start, program, status):
    process = start(program)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == status
    assert ("ValueError: told" in err) is (status == 1)


def test_a_signal_of_the_launcher_goes_on_to_the_rank(start):
    process = start(
        """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 9


def test_the_rank_ends_when_its_process_is_killed(start):
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    rank = psutil.Process(int(process.stdout.readline()))
    assert rank.pid != process.pid
    process.kill()
    rank.wait(LIMIT)


def test_they_end_with_the_process_that_started_them(tmp_path):
    program = Path(launching.__file__).with_name("warm_interpreters.py")
    start = f"subprocess.Popen([sys.executable, '{program}', str(os.getpid()), '.'])"
    text = f"import os, subprocess, sys, time; {start}; time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as asking:
        _until(lambda: asking.connect_ex(warm_start.socket_path(str(tmp_path), "torch", 0)) == 0)
        own = psutil.Process(parent.pid)
        _until(lambda: len(own.children(recursive=True)) == 2)
        started = own.children(recursive=True)
        parent.kill()
        parent.wait()
        assert not psutil.wait_procs(started, LIMIT)[1]


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)
