"""Ranks that stall are named by those that wait, and cost a run nothing if they come back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.refusals import codes

PROGRAM = Path(__file__).parent / "programs" / "stalls.py"

STOPS = """
import os, signal
import torch
import hpctrain as ht
comm = ht.init()
engine = comm.torch()
buffer = engine.allocate(100, torch.float32, torch.device("cpu"))
comm.barrier()
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
for step in range(10):
    engine.allreduce(buffer, "small bucket").wait()
"""


@pytest.fixture(scope="module")
def parts(mpirun) -> dict[str, str]:
    """What was printed in each part of a run of four ranks on two hosts."""
    output = mpirun(PROGRAM, 4, "come_back", timeout=300, HPCTRAIN_STALL="2").stdout
    found = re.split(r"^== (.*)\n", output, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.long
def test_a_wait_below_the_limit_is_nobodys_business(parts):
    assert parts["below the limit"] == ""


def test_a_stopped_rank_is_named_once_by_the_lowest_with_what_its_host_sees(parts):
    part = parts["stopped"]
    named = (
        r"^hpctrain: rank 3 on node1 stalled: the others have been waiting up to \d+ s in .*large bucket.* of step 7$"
    )
    assert len(re.findall(named, part, re.M)) == 1 and part.count("stalled") == 1, part
    for once in ("  rank 3: stopped\n", "recorded 3 node1"):
        assert part.count(once) == 1
    ended = r"large bucket.* ended .*\d s$"
    assert re.search(ended, part, re.M)


def test_ranks_that_do_something_else_are_named_with_their_stacks(parts):
    part = parts["in Python and in a read"]
    named = (
        r"^hpctrain: rank 0 on node0, rank 2 on node1 stalled: the others have been waiting up to \d+ s "
        r"in allreduce \(sum\)"
    )
    assert len(re.findall(named, part, re.M)) == 1 and part.count("stalled") == 1, part
    # Each writes its own, when another rank of its host asks for it.
    for function in ("read_what_comes_late", "sleep_in_python"):
        assert part.count(f"in {function}\n") == 1
    assert part.count("recorded") == 2


def test_ranks_that_all_wait_are_told_apart_by_what_they_wait_for(parts):
    part = parts["different paths"]
    assert "stalled" not in part
    said = (
        r"^hpctrain: every rank has been waiting for others, for up to \d+ s: "
        r"path 0 at \S+ \(rank 0, 2\); path 1 at \S+ \(rank 1, 3\)$"
    )
    assert len(re.findall(said, part, re.M)) == 1, part


def test_nothing_is_left_at_the_end(parts):
    assert parts["end"].count("shut down") == 4


def test_a_rank_that_hangs_in_mpi_is_ended_with_the_status_of_a_run_that_can_be_resumed(mpirun):
    result = mpirun(PROGRAM, 2, "block", check=False, timeout=200, HPCTRAIN_STALL="1", HPCTRAIN_TIMEOUT="4")
    assert result.returncode == 4
    assert "HT-wait-timed-out" in codes(result.stdout)
    told = r"^hpctrain: error\[HT-wait-timed-out\]: rank 0 .*4 s .*rank 1 .*small bucket"
    assert re.search(told, result.stdout, re.M)
    assert "in sleep_in_python" in result.stdout


def test_over_gloo_every_other_rank_names_the_one_that_is_stopped(mpirun):
    result = mpirun(PROGRAM.with_name("stopped_rank.py"), 3, check=False, timeout=120, HPCTRAIN_TIMEOUT="4")
    assert result.returncode == 4, result.stdout
    errors = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"code"')]
    assert sorted(each["on"] for each in errors) == [0, 2]
    for each in errors:
        assert (each["code"], each["exit_code"]) == ("HT-wait-timed-out", 4)
        assert each["values"]["ranks"] == f"rank 1 on {each['host']}"
        assert each["values"]["what"] == "bucket" and each["after"] > 3.5


@pytest.mark.long
def test_a_run_whose_rank_0_never_comes_back_can_be_resumed(hpctrain, tmp_path):
    (tmp_path / "script.py").write_text(STOPS)
    result = hpctrain(
        *("run", "script.py", "-np", "3", "--oversubscribe", "--backend", "mpi", "--run-dir", "run"),
        timeout=200,
        HPCTRAIN_STALL="2",
        HPCTRAIN_TIMEOUT="5",
    )
    assert result.returncode == 4, result.stdout
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    stalls = [event for event in events if event["event"] == "stall"]
    assert [(stall["rank"], stall["state"], stall["iteration"]) for stall in stalls] == [(0, "stopped", None)]
    assert stalls[0]["seconds"] >= 2 and "small bucket" in stalls[0]["waiting_for"]
    assert "rank 0 " in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["code"]) == ("resumable", "HT-wait-timed-out")
    assert summary["failure"]["rank"] in (1, 2) and "small bucket" in summary["failure"]["message"]
