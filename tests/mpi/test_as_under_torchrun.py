"""A script lives on the ranks of ``hpctrain run`` as on those of torchrun: exit status, files, output and handlers."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.interrupted_runs import started
from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs" / "as_under_torchrun"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def files(folder: Path) -> dict[str, str]:
    """What the ranks have written, without what belongs to the launcher."""
    return {each.name: each.read_text() for each in folder.iterdir() if each.is_file()}


def by_torchrun(folder: Path, program: str) -> tuple[bool, dict[str, str]]:
    command = [*TORCHRUN, program, "a b"]
    result = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, timeout=300, stdin=subprocess.DEVNULL
    )
    return result.returncode == 0, files(folder)


@pytest.mark.parametrize("program", ["ends", "fails", "meets", "named"])
def test_exit_status_and_files_are_those_of_torchrun(hpctrain: Launch, tmp_path: Path, program: str) -> None:
    name = f"{program}.py"
    for folder in (tmp_path, tmp_path / "reference"):
        folder.mkdir(exist_ok=True)
        shutil.copy(PROGRAMS / name, folder)
    result = hpctrain("run", name, "-np", "2", "--run-dir", "run", "--", "a b")
    reference = by_torchrun(tmp_path / "reference", name)
    assert (result.returncode == 0, files(tmp_path)) == reference, result.stdout


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [([], 0, "report: hpctrain report"), (["passes on"], 4, "to resume: hpctrain run --resume")],
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
    assert files(tmp_path) == {"saved-0.txt": "state", "saved-1.txt": "state"}


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_rank_0_reads_what_the_launcher_was_given(tmp_path: Path, launcher: str) -> None:
    """torchrun itself has all ranks read from one pipe; mpirun gives it to rank 0."""
    words = [str(PROGRAMS / "asks.py"), "-np", "2", "--run-dir", "run", "--launcher", launcher]
    command = [sys.executable, "-m", "hpctrain", "run", *words]
    result = subprocess.run(command, check=False, cwd=tmp_path, input=b"yes\nmore", stdout=subprocess.PIPE, timeout=100)
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith(b"go on? [y/n] ")
    assert files(tmp_path) == {"answer-0.txt": "yesmore", "answer-1.txt": ""}


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
    ("halt", "status", "code", "named"),
    [
        # Known long before the limit.
        ("break", 1, "HT-ranks-in-different-places", r"rank 1 on \S+ at the end of its script"),
        ("time.sleep(1000)", 4, "HT-wait-timed-out", r"rank 0 on \S+ waited 40 s for rank 1"),
    ],
)
def test_a_rank_that_the_others_wait_for_in_ddp_is_named(
    hpctrain: Launch, tmp_path: Path, halt: str, status: int, code: str, named: str
) -> None:
    """DDP waits in C++, where an error of a collective has to arrive too."""
    (tmp_path / "script.py").write_text(LOOP.format(halt=halt))
    result = hpctrain("run", "script.py", "-np", "2", HPCTRAIN_STALL="4", HPCTRAIN_TIMEOUT="40")
    assert (result.returncode, code in codes(result.stdout)) == (status, True), result.stdout
    assert re.search(named, result.stdout)


@pytest.mark.long
def test_what_an_error_about_a_divided_tensor_means_is_said_once(hpctrain: Launch, tmp_path: Path) -> None:
    script = """\
import torch
import hpctrain as ht
ht.init()
model = torch.nn.Linear(3, 5)
ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=ht.mesh(dp_shard=2))
model(torch.ones(2, 3)).sum().backward()
model.weight.grad.reshape(-1)
"""
    (tmp_path / "flat.py").write_text(script)
    result = hpctrain("run", "flat.py", "-np", "2", "--run-dir", "run")
    assert result.returncode == 1, result.stdout
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert max(log.count("t.full_tensor()") for log in logs) == 1, logs
