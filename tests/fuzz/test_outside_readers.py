"""Readers of outside data, given anything: a value or an error for the user, in bounded memory."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import outside_data, outside_texts
from hpctrain.common.errors import HpctrainError

READERS = {**outside_texts.READERS, **outside_data.READERS}
_MOST_BYTES = 3 << 30
_EXAMPLES = 100

# What was found once, by the reader that took it wrongly.
_FOUND: dict[str, list[bytes]] = {
    "events": [
        # KeyError and TypeError of what shows faults.
        b'{"time": 1, "event": "fault", "rank": 1, "host": "n", "message": "", "recovery_seconds": 1}\n',
        b'{"time": 1, "event": "fault", "rank": 1, "host": "n", "message": "", "recovery_seconds": "1", '
        b'"iteration": 1, "samples_affected": 0, "ranks": 1}\n',
        # ValidationError of the status.
        b'{"time": 1, "event": "start", "attempt": 1, "iteration": 0, "hosts": [null]}\n',
        # OverflowError of the time that remains.
        b'{"time": 1, "event": "start", "attempt": 1, "iteration": ' + b"9" * 400 + b"}\n",
        # OverflowError of the rules.
        b'{"time": ' + b"9" * 400 + b', "event": "x"}\n',
    ],
    "hosts": [
        # Digits before the bracket went into its numbers, more than were counted.
        b"gpu11[0-6046,0]gpn1",
    ],
    "slurm": [
        # ValueError of a job that has no number; OverflowError of a time that no calendar has.
        b"\x1f".join((b"x", b"12", b"PENDING", b"None", b"N/A", *b"0:00 1:00".split(), b"", b"0", b"0", b"x", b"/"))
        + b"\x1f\n",
        b"\x1f".join((b"12", b"12", b"PENDING", b"None", b"9" * 40, *b"0:00 1:00".split(), b"", b"0", b"0", b"x", b"/"))
        + b"\x1f\n",
    ],
    "shards": [
        # tokenize.TokenError of NumPy's reader.
        b"\x93NUMPY\x01\x00v\x00{'descr': [('shard', '<u4')" + b" " * 96,
        # SyntaxError of it.
        b"\x93NUMPY\x01\x00v\x00{'descr': '" + b" " * 106,
    ],
}

# What breaks readers of numbers, names and lists.
_ODD = (
    b"",
    b"\0",
    b"\xff",
    b"-1",
    b"0",
    b"9" * 20,
    b"9" * 400,
    b"1e999",
    b"nan",
    b"null",
    b"{}",
    b"[" * 40,
    b"\r\n",
    b" ",
)


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A reader that asks for more memory gets a MemoryError, and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@st.composite
def _damaged(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A text that is right, with a few places cut out, doubled, or filled with something odd or a part of another."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 1) | st.integers(0, 80)))
        other = draw(st.sampled_from(seeds))
        at = draw(st.integers(0, len(other)))
        parts = st.sampled_from([*_ODD, content[start:end] * 2, other[at : at + 80]]) | st.binary(max_size=8)
        content = content[:start] + draw(parts) + content[end:]
    return content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 4)) == 0 else content


def _read(name: str, content: bytes, folder: str) -> None:
    try:
        READERS[name].read(content, Path(folder))
    except HpctrainError as error:
        assert error.message


@pytest.mark.parametrize("name", READERS)
def test_what_is_right_is_read(name: str, tmp_path: Path) -> None:
    """Some of the seeds at least; else all that follows would be refused at its first byte."""
    refused = 0
    seeds = list(READERS[name].seeds())
    for seed in seeds:
        try:
            READERS[name].read(seed, tmp_path)
        except HpctrainError:
            refused += 1
    assert refused < len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(240)
def test_anything_is_read_or_refused(name: str) -> None:
    seeds = list(READERS[name].seeds())
    with tempfile.TemporaryDirectory() as folder:

        @settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(_damaged(seeds))
        def check(content: bytes) -> None:
            _read(name, content, folder)

        check()


@pytest.mark.parametrize(("name", "content"), [(name, case) for name, cases in _FOUND.items() for case in cases])
@pytest.mark.timeout(20)
def test_what_was_found(name: str, content: bytes, tmp_path: Path) -> None:
    _read(name, content, str(tmp_path))
