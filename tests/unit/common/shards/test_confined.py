"""Decoders that crash, hang or take all memory: what they read is named, and the process that asked goes on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpctrain.cli.main import main
from hpctrain.common.shards import bounded, confined, decoding, one_shard
from hpctrain.common.shards.bounded import BeyondLimitsError
from hpctrain.common.shards.confined import end_all
from hpctrain.common.shards.fake import FakeSet, make_fake
from hpctrain.common.shards.processes import worker_processes
from support.refusals import refused

_MEMORY = 1 << 30
# Other processes have the cores too.
_SPARE_SECONDS = 30


def _crash() -> None:
    ctypes.string_at(0)


def _abort() -> None:
    # As a library does that panics.
    os.write(2, b"thread panicked")
    os.abort()


def _loop() -> None:
    while True:
        pass


def _sleep() -> None:
    time.sleep(3600)


def _take_memory() -> None:
    bytearray(4 * _MEMORY)


_HARMS = {each.__name__: each for each in (_crash, _abort, _loop, _sleep, _take_memory)}


def _read(name: str, harm: str | None, seconds: float = 1) -> str:
    with bounded.bounded(name, _MEMORY, seconds):
        if harm:
            _HARMS[harm]()
    return name


def _pid(_: object = None) -> int:
    return os.getpid()


def _fail(words: str) -> None:
    raise ValueError(words)


@pytest.mark.parametrize("harm", _HARMS)
def test_what_ends_a_process_is_named(
    harm: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # One that prints here.
    end_all()
    # What takes processor time is ended by the limit on that.
    monkeypatch.setattr(confined, "_WAITING_TIMES", 3 if harm == "_sleep" else 1_000_000)
    begun = time.monotonic()
    with refused("HT-file-harmful", what="a/file") as caught:
        confined.call_confined(_read, "a/file", harm)
    assert time.monotonic() - begun < _SPARE_SECONDS
    error = caught.value
    assert isinstance(error, BeyondLimitsError) and error.what == "a/file" and error.exit_code == 2
    assert confined.call_confined(_read, "another", None) == "another"
    assert capfd.readouterr() == ("", "")


def test_a_process_serves_many_calls() -> None:
    pids = {confined.call_confined(_pid) for _ in range(3)}
    assert len(pids) == 1 and os.getpid() not in pids
    with pytest.raises(ValueError, match="odd"):
        confined.call_confined(_fail, "odd")
    assert confined.call_confined(_pid) in pids
    end_all()
    assert not any(map(psutil.pid_exists, pids))


def test_so_many_at_a_time_as_workers() -> None:
    with worker_processes(2) as run:
        assert 1 <= len(set(run(_confined_pid, range(20)))) <= 2
        with refused("HT-file-harmful", what="b/file"):
            list(run(_confined_read, [("a/file", None), ("b/file", "_crash")]))


def _confined_pid(_: int) -> int:
    time.sleep(0.01)
    return confined.call_confined(_pid)


def _confined_read(arguments: tuple[str, str | None]) -> str:
    return confined.call_confined(_read, *arguments)


def _kill_self(name: str) -> None:
    with bounded.bounded(name, _MEMORY):
        os.kill(os.getpid(), signal.SIGKILL)


def _half_an_answer(name: str) -> None:
    with bounded.bounded(name, _MEMORY):
        os.write(int(sys.argv[1]), b"\0\0\0\x10half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [_kill_self, _half_an_answer])
def test_one_that_the_system_kills_is_not_the_fault_of_the_file(end: Callable[[str], None]) -> None:
    with refused("HT-process-killed", place=", while it read a/file") as caught:
        confined.call_confined(end, "a/file")
    assert not isinstance(caught.value, BeyondLimitsError) and caught.value.exit_code == 1


@pytest.mark.parametrize("kind", ["as", "data"])
def test_too_low_a_limit_of_the_shell_is_not_the_fault_of_an_image(kind: str, tmp_path: Path) -> None:
    make_fake(tmp_path / "archives", FakeSet(images=60, classes=2, seed=0, size=16, broken=0))
    command = [sys.executable, "-m", "hpctrain", "data", "shard", "archives", "shards"]
    done = subprocess.run(
        ["prlimit", f"--{kind}=2048000000", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "ulimit" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "shards" / "manifest.json").exists()


# Stands for a decoder with a fault in it: each process that imports site has it.
_HARMFUL = """
import os, sys
from importlib.abc import MetaPathFinder
class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hpctrain.common.shards.one_shard":
            sys.meta_path.remove(self)
            import hpctrain.common.shards.decoding as decoding
            plain = decoding.fault
            def fault(content):
                if len(content) == int(os.environ["HARMFUL_BYTES"]):
                    os.kill(os.getpid(), 11) if os.environ["HARM"] == "crash" else bytearray(1 << 33)
                return plain(content)
            decoding.fault = fault
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("harm", ["crash", "memory"])
def test_images_that_harm_the_decoder_are_broken_and_the_others_are_there(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_fake(tmp_path / "archives", FakeSet(images=60, classes=2, seed=0, size=16, broken=0))
    command = ["data", "shard", str(tmp_path / "archives"), "--shard-samples", "10", "--json"]
    assert main([*command, str(tmp_path / "plain")]) == 0
    sizes = [
        row[1]
        for record in (tmp_path / "plain" / "records").iterdir()
        for row in json.loads(record.read_text())["rows"]
    ]
    odd = next(size for size in sizes if sizes.count(size) == 1)
    end_all()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_HARMFUL)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HARMFUL_BYTES", str(odd))
    monkeypatch.setenv("HARM", harm)
    capsys.readouterr()
    assert main([*command, str(tmp_path / "harmed")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["broken"]) == 1
    assert ("SIGSEGV" if harm == "crash" else "2.1 GB") in found["broken"][0]["message"]
    assert found["splits"]["train"]["samples"] == 54
    for path in (tmp_path / "plain").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "harmed" / path.name).read_bytes()
    # Too many of them are no accident.
    monkeypatch.setattr(one_shard, "_MOST_FATAL", 0)
    end_all()
    assert main([*command, str(tmp_path / "refused")]) == (2 if harm == "crash" else 0)
    end_all()


def test_nothing_is_decoded_in_the_process_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_fake(tmp_path / "archives", FakeSet(images=60, classes=2, seed=0, size=16, broken=0))

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(decoding, "fault", never)
    monkeypatch.setattr(one_shard, "fault", never)
    monkeypatch.setattr("hpctrain.common.shards.devkit._synsets", never)
    monkeypatch.setattr("tarfile.open", never)
    assert main(["data", "shard", str(tmp_path / "archives"), str(tmp_path / "out")]) == 0
    capsys.readouterr()
