"""What one process learns of another, and that it harms none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import psutil
import pytest

from hpctrain.worker.comm.stacks import STACK_SIGNAL, Process, StackFile, look_at

BEGIN = """
import dataclasses, json, os, sys, threading
from hpctrain.worker.comm.stacks import StackFile
file = StackFile()
def say():
    print(json.dumps(dataclasses.asdict(file.process)), flush=True)
"""
SLEEPER = """
def reading_what_never_comes():
    say()
    sys.stdin.readline()
reading_what_never_comes()
file.close()
print("closed", flush=True)
sys.stdin.readline()
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
FORKS = (
    """
if os.fork() == 0:
    file.close()
    os._exit(0)
os.wait()
"""
    + SLEEPER
)


@contextmanager
def started(program: str) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, Process(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], Process]]:
    with started(SLEEPER) as both:
        yield both


def test_the_stack_says_where_a_process_is_however_often_it_is_asked(sleeper):
    process, found = sleeper
    for _ in range(2):
        state, stack = look_at(found)
        assert state in ("S (sleeping)", "R (running)")
        assert stack.count("in reading_what_never_comes") == 1
    assert process.poll() is None


def test_the_main_thread_answers_where_an_extension_keeps_the_interpreters_lock():
    with started(KEEPS_THE_LOCK) as (process, found):
        assert look_at(found)[1].count("in computing_in_an_extension") == 1
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_no_report_harms_a_process_whose_threads_come_and_go(times):
    with started(BUSY) as (process, found):
        for _ in range(times):
            assert "in being_where_main_is" in look_at(found)[1]
        assert process.poll() is None


def test_a_fork_that_ends_leaves_its_parent_able_to_answer():
    with started(FORKS) as (_, found):
        assert "in reading_what_never_comes" in look_at(found)[1]


def test_a_stopped_process_is_not_asked(sleeper):
    process, found = sleeper
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        pass
    assert look_at(found) == ("T (stopped)", "")
    process.send_signal(signal.SIGCONT)
    assert "in reading_what_never_comes" in look_at(found)[1]


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"inode": 1}, {"descriptor": 0}, {"descriptor": 999}, {"descriptor": None}])
def test_a_process_that_is_another_gets_no_signal(sleeper, other):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        for found in (replace(sleeper[1], **other), replace(sleeper[1], pid=bystander.pid)):
            state, stack = look_at(found)
            assert "unknown" in state and stack == ""
        assert bystander.poll() is None, "the signal would have ended it"
        bystander.kill()


def test_a_signal_that_comes_too_late_ends_nobody(sleeper):
    process, found = sleeper
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "closed\n"
    assert not found.lives()
    process.send_signal(STACK_SIGNAL)
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(20) == 0


def test_a_program_that_uses_the_signal_keeps_it():
    def handler(number, frame): ...

    before = signal.signal(STACK_SIGNAL, handler)
    try:
        file = StackFile()
        assert not file.process.signalled
        file.close()
        assert signal.getsignal(STACK_SIGNAL) is handler
    finally:
        signal.signal(STACK_SIGNAL, before)


def test_files_do_not_pile_up():
    before = psutil.Process().num_fds()
    for _ in range(20):
        file = StackFile()
        assert asdict(file.process)["descriptor"] is not None
        file.close()
    assert psutil.Process().num_fds() == before
