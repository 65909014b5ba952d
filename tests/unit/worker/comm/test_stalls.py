"""What one process learns of another, and that it harms none."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hpctrain.worker.comm.stalls import STACK_SIGNAL, answer_requests, request_stack

HOST = socket.gethostname()
BEGIN = """
import json, os, sys, threading
from hpctrain.worker.comm.stalls import answer_requests
answer_requests()
answer_requests()  # as ranks do that meet anew
def say():
    print("begun", flush=True)
"""
SLEEPER = """
def reading_what_never_comes():
    say()
    sys.stdin.readline()
reading_what_never_comes()
"""
KEEPS_THE_LOCK = """
def computing_in_an_extension():
    say()
    sum(range(10**12))
computing_in_an_extension()
"""
BUSY = """
def recursing(depth):
    return depth and recursing(depth - 1) + sum(map(len, "frames that come and go".split()))
def being_busy():
    for _ in range(50):
        recursing(20)
def starting_threads():
    while True:
        thread = threading.Thread(target=being_busy)
        thread.start()
        thread.join()
for _ in range(3):
    threading.Thread(target=starting_threads, daemon=True).start()
def being_where_main_is():
    say()
    starting_threads()
being_where_main_is()
"""


class Looked:
    """A process, what others see of it, and how often its log names a function."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.started = psutil.Process(process.pid).create_time()

    def state(self) -> str:
        return request_stack(HOST, self.process.pid, self.started)

    def logged(self, function: str, times: int) -> None:
        end = time.monotonic() + 20
        while self.log.read_text().count(f"in {function}\n") < times:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)


@pytest.fixture
def started(tmp_path: Path) -> Callable[[str], object]:
    @contextmanager
    def starting(program: str) -> Iterator[Looked]:
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-c", BEGIN + program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                assert process.stdout.readline() == "begun\n"
                yield Looked(process, tmp_path / "log")
            finally:
                process.kill()

    return starting


@pytest.mark.parametrize(
    ("program", "function"), [(SLEEPER, "reading_what_never_comes"), (KEEPS_THE_LOCK, "computing_in_an_extension")]
)
def test_a_process_writes_where_it_is_however_often_it_is_asked(started, program, function):
    with started(program) as looked:
        for times in (1, 2):
            assert "its log says" in looked.state()
            looked.logged(function, times)
        assert looked.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_no_report_harms_a_process_whose_threads_come_and_go(started, times):
    with started(BUSY) as looked:
        for time_ in range(times):
            looked.state()
            looked.logged("being_where_main_is", time_ + 1)
        assert looked.process.poll() is None


def test_a_process_that_is_another_gets_no_signal():
    with subprocess.Popen(["sleep", "60"]) as bystander:
        start = psutil.Process(bystander.pid).create_time()
        assert request_stack(HOST, bystander.pid, start) in ("running", "sleeping")
        for host, begun in (("elsewhere", start), (HOST, start - 60)):
            assert "unknown" in request_stack(host, bystander.pid, begun)
        assert bystander.poll() is None, "the signal would have ended it"
        bystander.kill()
    assert "unknown" in request_stack(HOST, bystander.pid, start)


def test_a_program_that_uses_the_signal_keeps_it():
    def handler(number, frame): ...

    before = signal.signal(STACK_SIGNAL, handler)
    try:
        answer_requests()
        assert signal.getsignal(STACK_SIGNAL) is handler
    finally:
        signal.signal(STACK_SIGNAL, before)
