"""A script lives on the ranks of ``hpctrain run`` as on those of torchrun: exit status, files, output and handlers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.interrupted_runs import started
from support.launching import Launch
from support.ports import free_port
from support.refusals import codes

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs" / "as_under_torchrun"
# What the ranks are given beside the words of the launcher.
ENVIRONMENT = {"OF_THE_USER": "a b", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Callable[[Path, list[str]], bool]]:
    """``torchrun(folder, words)`` runs that on two ranks there; returns whether it ended with status 0."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS.with_name("torchruns.py"))],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    ) as server:
        assert server.stdin and server.stdout
        ask, answers = server.stdin, server.stdout

        def run(folder: Path, words: list[str]) -> bool:
            options = [f"--master-port={free_port()}", "--nproc-per-node=2", "--log-dir=logs", "--redirects=3"]
            print(json.dumps([str(folder), *options, *words]), file=ask)
            return answers.readline() == "0\n"

        yield run
        ask.close()


def files(folder: Path) -> dict[str, bytes]:
    """What the ranks have written, without what belongs to the launcher."""
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file() and each.suffix != ".py"}


def printed(folder: Path, rank: int) -> Counter[str]:
    """The lines that a rank of ``hpctrain run`` has printed, without those of hpctrain."""
    return lines_of((folder / "run" / "logs" / f"rank-{rank}.log").read_text(), folder)


def lines_of(text: str, folder: Path) -> Counter[str]:
    """The lines, in any order, since torchrun keeps the two streams apart, and without places that differ."""
    # Whether Python still warns of a file that is open at its end is a matter of chance.
    text = re.sub(r"^(hpctrain|sys:1: ResourceWarning): .*\n", "", text, flags=re.M)
    text = re.sub(r"\S+/site-packages|0x[0-9a-f]+", "PLACE", text)
    return Counter(text.replace(str(folder), "FOLDER").splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ["finds.py", "a b", "--lr=0.1"],
        ["distributes.py"],
        ["fails.py"],
        ["left_early.py"],
    ],
    ids=lambda words: words[0],
)
def test_exit_status_files_and_output_are_those_of_torchrun(
    hpctrain: Launch, torchrun: Callable[[Path, list[str]], bool], tmp_path: Path, words: list[str]
) -> None:
    reference = tmp_path / "reference"
    for folder in (tmp_path, reference):
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    name, *arguments = words
    result = hpctrain("run", name, "-np", "2", "--run-dir", "run", "--", *arguments, **ENVIRONMENT)
    ended_well = torchrun(reference, words)
    assert (result.returncode == 0) == ended_well, result.stdout
    own, others = files(tmp_path), files(reference)
    differing = {each for each in own.keys() | others.keys() if own.get(each) != others.get(each)}
    assert not differing, [(each, own.get(each), others.get(each)) for each in differing]
    for rank in range(2):
        logs = sorted(reference.glob(f"logs/*/attempt_0/{rank}/std*.log"))
        assert printed(tmp_path, rank) == lines_of("".join(log.read_text() for log in logs), reference)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 0, "report: hpctrain report"),
        pytest.param(["passes on"], 4, "to resume: hpctrain run --resume", marks=pytest.mark.thorough),
    ],
)
def test_ctrl_c_is_a_keyboard_interrupt_in_each_rank(tmp_path: Path, words: list[str], status: int, told: str) -> None:
    arguments = [str(PROGRAMS / "interrupted.py"), "-np", "2", "--run-dir", "run", "--", *words]
    with started(tmp_path, arguments) as process:
        logs = [tmp_path / "run" / "logs" / f"rank-{rank}.log" for rank in range(2)]
        while not all(log.exists() and "begun" in log.read_text() for log in logs):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert told in output
    assert files(tmp_path) == {"saved-0.txt": b"state", "saved-1.txt": b"state"}


def test_ctrl_c_ends_a_wait_in_ddp_for_a_rank_that_it_has_interrupted(tmp_path: Path) -> None:
    """DDP waits in C++, where Python raises no KeyboardInterrupt."""
    script = tmp_path / "script.py"
    script.write_text(LOOP.format(halt='print("begun", flush=True); time.sleep(1000)'))
    with started(tmp_path, [str(script), "-np", "2", "--run-dir", "run"]) as process:
        log = tmp_path / "run" / "logs" / "rank-1.log"
        while not (log.exists() and "begun" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        # It would wait for a minute for ranks that are saving their state.
        output, _ = process.communicate(timeout=55)
    assert process.returncode == 4, output
    assert "all ranks have left" in output


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.thorough)])
def test_rank_0_reads_what_the_launcher_was_given(tmp_path: Path, launcher: str) -> None:
    """torchrun itself has all ranks read from one pipe; mpirun gives it to rank 0."""
    words = [str(PROGRAMS / "asks.py"), "-np", "2", "--run-dir", "run", "--launcher", launcher]
    command = [sys.executable, "-m", "hpctrain", "run", *words]
    result = subprocess.run(command, check=False, cwd=tmp_path, input=b"yes\nmore", stdout=subprocess.PIPE, timeout=100)
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith(b"go on? [y/n] ")
    assert files(tmp_path) == {"answer-0.txt": b"yesmore", "answer-1.txt": b""}


LOOP = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for step in range(20):
    if dist.get_rank() == 1 and step == 10:
        {halt}
    model(torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("halt", "named"),
    [
        ("break", r"waited 8 s for rank 1 on .* at the end of its script"),
        pytest.param("time.sleep(1000)", r"rank 0 on \S+ waited 8 s for rank 1", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_the_others_wait_for_in_ddp_is_named(
    hpctrain: Launch, tmp_path: Path, halt: str, named: str
) -> None:
    """DDP waits in C++, where an error of a collective has to arrive too."""
    (tmp_path / "script.py").write_text(LOOP.format(halt=halt))
    result = hpctrain("run", "script.py", "-np", "2", HPCTRAIN_STALL="3", HPCTRAIN_TIMEOUT="8")
    assert (result.returncode, "HT-wait-timed-out" in codes(result.stdout)) == (4, True), result.stdout
    assert re.search(named, result.stdout)


LEFT = """
import torch
import torch.distributed as dist
import hpctrain as ht

model = torch.nn.Linear(4, 2)
if {own}:
    rank = ht.init().rank
    model, _ = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
else:
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), torch.nn.parallel.DistributedDataParallel(model)
try:
    for step in range(20):
        if rank == 1 and step == 10:
            raise ValueError("a bad sample")
        model(torch.ones(3, 4)).sum().backward()
finally:
    {leave}
"""


@pytest.mark.parametrize(("own", "leave"), [(False, "dist.destroy_process_group()"), (True, "ht.shutdown()")])
def test_an_error_is_not_kept_back_by_a_finally_block_that_leaves_the_run(
    hpctrain: Launch, tmp_path: Path, own: bool, leave: str
) -> None:
    """Leaving waits for the other ranks, and these wait for the one that has failed."""
    (tmp_path / "script.py").write_text(LEFT.format(own=own, leave=leave))
    result = hpctrain("run", "script.py", "-np", "2", HPCTRAIN_TIMEOUT="40")
    assert (result.returncode, "HT-rank-exception" in codes(result.stdout)) == (1, True), result.stdout
    assert "ValueError: a bad sample" in result.stdout
