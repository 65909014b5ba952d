"""What one process learns of another, and that it harms none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import psutil
import pytest

from hpctrain.comm.stacks import STACK_SIGNAL, Process, StackFile, look_at

SLEEPER = """
import dataclasses, json, sys
from hpctrain.comm.stacks import StackFile
file = StackFile()
def reading_what_never_comes():
    print(json.dumps(dataclasses.asdict(file.process)), flush=True)
    sys.stdin.readline()
reading_what_never_comes()
file.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], Process]]:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, Process(**json.loads(process.stdout.readline()))
        process.kill()


def test_the_stack_says_where_a_process_is_however_often_it_is_asked(sleeper):
    process, found = sleeper
    for _ in range(2):
        state, stack = look_at(found)
        assert state in ("S (sleeping)", "R (running)")
        assert stack.count("in reading_what_never_comes") == 1
    assert process.poll() is None


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
            assert look_at(found) == ("state unknown: its process cannot be seen", "")
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
        assert file.process == Process(pid=os.getpid())
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
