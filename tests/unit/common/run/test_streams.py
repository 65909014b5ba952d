"""What a rank writes to stdout and to stderr is one log, and is told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.streams import Streams, without_marks

WRITES = """
import os, sys
from hpctrain.common.run.streams import mark_stderr
mark_stderr()
for number, text in enumerate(sys.argv[1:]):
    print(text, end="", file=sys.stderr if number % 2 else sys.stdout, flush=True)
if pid := os.fork():
    os.waitpid(pid, 0)
else:
    print("of a fork", file=sys.stderr)
    os._exit(0)
"""
PIECES = """
import os, sys
from hpctrain.common.run.streams import mark_stderr
mark_stderr()
print("a", 1, file=sys.stderr)
print("b", end="", file=sys.stderr)
print("c", 2)
print("d", end="", file=sys.stderr, flush=True)
os.system("echo e")
print("f", end="", file=sys.stderr)
if pid := os.fork():
    os.waitpid(pid, 0)
    print("h")
    print("i", end="", file=sys.stderr)
    os.kill(os.getpid(), 9)
print("g")
os._exit(0)
"""
TEXTS = ["one\n", "é 10%\r", "\x1f two", "\x02no mark\x03\r\n", "three", "\n\n"]


def written() -> bytes:
    """Both streams of a process, which are one pipe."""
    command = [sys.executable, "-u", "-c", WRITES, *TEXTS]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout


LOG = written()


@given(st.lists(st.integers(min_value=1, max_value=9), max_size=len(LOG)))
def test_both_streams_come_out_whole_and_in_order_however_the_log_is_read(sizes: list[int]) -> None:
    streams, parts, begin = Streams(), list[tuple[bool, str]](), 0
    for size in [*sizes, len(LOG)]:
        parts += streams.divide(LOG[begin : begin + size])
        begin += size
    assert "".join(text for is_stderr, text in parts if not is_stderr) == "".join(TEXTS[::2])
    assert "".join(text for is_stderr, text in parts if is_stderr) == "".join([*TEXTS[1::2], "of a fork\n"])
    assert "".join(text for _, text in parts) == "".join(TEXTS) + "of a fork\n"


def test_a_line_without_its_marks() -> None:
    assert without_marks(LOG.decode()) == "".join(TEXTS) + "of a fork\n"


def test_a_line_in_pieces_is_whole_in_the_log_and_never_lost() -> None:
    command = [sys.executable, "-u", "-c", PIECES]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    parts = list(Streams().divide(done.stdout))
    assert done.returncode == -9
    assert b"a 1\n" in done.stdout
    assert "".join(text for is_stderr, text in parts if is_stderr) == "a 1\nbdfi"
    assert "".join(text for is_stderr, text in parts if not is_stderr) == "c 2\ne\ng\nh\n"


HARD = """
import os, resource, signal, sys
from hpctrain.common.run.streams import mark_stderr
mark_stderr()

signal.signal(signal.SIGALRM, lambda *_: print("from a handler", file=sys.stderr))
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
for number in range(3000):
    print("line", number, file=sys.stderr)
signal.setitimer(signal.ITIMER_REAL, 0)

resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(2).st_size + 20, resource.RLIM_INFINITY))
try:
    print("x" * 100, file=sys.stderr)
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

os.dup2(os.open("own", os.O_WRONLY | os.O_CREAT), 2)
print("into a file of its own", file=sys.stderr)
"""


def test_signals_full_disks_and_files_of_ones_own(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", HARD], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True, check=True
        )
    assert done.stdout == "OSError\n"
    assert (tmp_path / "own").read_text() == "into a file of its own\n"
    printed = without_marks((tmp_path / "log").read_text())
    assert "from a handler" in printed
    # A handler may print in the middle of a line.
    lines = printed.replace("from a handler", "").replace("\n", "")
    assert lines.rstrip("x") == "".join(f"line {number}" for number in range(3000))
