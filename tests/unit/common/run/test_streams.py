"""What a rank writes to stdout and to stderr is one log, and is told apart."""

from __future__ import annotations

import subprocess
import sys

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
