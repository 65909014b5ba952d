"""Texts of nccl-tests as launchers and collectors of logs leave them."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.nccl_tests import nccl_curves
from support.refusals import refused

MEASURED = Path(__file__).parent / "measured"
SPARK = (MEASURED / "nccl-tests-2.20.txt").read_text()
H100 = (MEASURED / "nccl-tests-2.13.txt").read_text()


# As they come from Slurm, Open MPI 4 and 5, Hydra, Kubernetes, Docker and clush.
@pytest.mark.parametrize(
    "prefix",
    [
        " 0: ",
        "0: ",
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "[prterun-h-123@1,0]<stdout>: ",
        "[Fri Nov 27 07:09:25 2026][1,0]<stdout>: ",
        "[0]<stdout>: ",
        "[0] ",
        "0@n1:0:",
        "2026-11-27T06:59:55.123456789Z ",
        "[pod/nccl-test-launcher-x8k2p/launcher] 2026-11-27T06:59:55.123456789Z ",
        "launcher-1  | ",
        "n1: ",
        "> ",
    ],
)
def test_prefixes(prefix: str) -> None:
    for text in (SPARK, H100):
        assert nccl_curves("".join(f"{prefix}{line}\n" for line in text.splitlines()), "x") == nccl_curves(text, "x")


@given(data=st.data())
def test_prefixes_of_any_words_and_numbers(data: st.DataObject) -> None:
    """The same signs in each line, and other words and numbers between."""
    word = st.text(string.ascii_letters + string.digits, min_size=1, max_size=8)
    signs = data.draw(
        st.lists(st.sampled_from(["[", "]", ":", "/", "|", "<", ">", "-", ".", "@", ","]), min_size=1, max_size=5)
    )
    lines = ["".join(data.draw(word) + sign for sign in signs) + f" {line}" for line in SPARK.splitlines()]
    assert nccl_curves("\n".join(lines), "x") == nccl_curves(SPARK, "x")


def test_lines_of_other_ranks_between() -> None:
    lines = [f" 0: {line}\n 1: n2:7:7 [1] NCCL INFO Channel 00 : 1 -> 0" for line in SPARK.splitlines()]
    assert nccl_curves("\n".join(lines), "x") == nccl_curves(SPARK, "x")
    lines = [f"{rank}: {line}" for line in SPARK.splitlines() for rank in (0, 1)]
    with refused("HT-nccl-tests-not-usable"):
        nccl_curves("\n".join(lines), "x")


def test_several_runs_in_one_file() -> None:
    assert nccl_curves(SPARK + H100, "x") == [*nccl_curves(SPARK, "x"), *nccl_curves(H100, "x")]
    with refused("HT-nccl-tests-not-usable", where="x:47"):
        nccl_curves(SPARK + H100[:-200], "x")


def table(
    hosts: tuple[str, ...], factor: float, *, group: int = 0, gpus: tuple[str, ...] = ("NVIDIA H100 80GB HBM3",)
) -> str:
    """What is printed of a rank on each of the hosts, and of one size, 1 MiB in 400 us."""
    ranks = [
        f"#  Rank {rank:2} Group {group:2} Pid  100 on  {host} device  0 [0000:10:00] {gpus[rank % len(gpus)]}"
        for rank, host in enumerate(hosts)
    ]
    rate = 2**20 / 400 / 1e3
    times = f"  400.00  {rate:.2f}  {rate * factor:.2f}  0"
    row = f"  1048576  262144  float  sum  -1{times}{times}"
    header = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"
    return "\n".join([*ranks, header, row, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""])


@pytest.mark.parametrize(
    "text",
    [
        table(("n1", "n1", "n1", "n2"), 1.5),
        table(("n1",), 0.0),
        table(("n1", "n2"), 1.0, group=1),
        table(("n1", "n1"), 1.0, gpus=("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")),
        # Half of an all-reduce's: a reduce-scatter.
        table(("n1", "n1"), 0.5),
        # Of two ranks, a reduce has the bus bandwidth of an all-reduce; its root tells it.
        table(("n1", "n1"), 1.0).replace("sum  -1", "sum  0"),
        table(("n1", "n1"), 1.0).replace("sum  -1", "none  -1"),
    ],
)
def test_runs_that_do_not_tell_how_long_an_all_reduce_takes(text: str) -> None:
    with refused("HT-nccl-tests-not-usable") as wrong:
        nccl_curves(text, "x")
    assert wrong.value.hint


def test_a_table_that_is_whole_is_read() -> None:
    (curve,) = nccl_curves(table(("n1", "n1", "n2", "n2"), 1.5), "x")
    assert (curve.ranks, curve.hosts, curve.points) == (4, 2, ((2**20, pytest.approx(4e-4)),))
