"""Files of nccl-tests as launchers, logs and split communicators leave them."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.curves import Curve, nccl_curves
from support.refusals import refused

MEASURED = Path(__file__).parent / "measured"
SPARK = (MEASURED / "nccl-tests-2.20.txt").read_text()
H100 = (MEASURED / "nccl-tests-2.13.txt").read_text()

_HEADER = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"


def table(
    places: list[tuple[int, str]], factor: float, *, micros: float = 400.0, gpu: str = "NVIDIA H100 80GB HBM3"
) -> str:
    """What is printed of ranks, each with its group and host, and of one size, 1 MiB in ``micros``."""
    ranks = [
        f"#  Rank {rank:2} Group {group:2} Pid  100 on  {host} device  0 [0000:10:00] {gpu}"
        for rank, (group, host) in enumerate(places)
    ]
    rate = 2**20 / micros / 1e3
    times = f"  {micros:.2f}  {rate:.2f}  {rate * factor:.2f}  0"
    row = f"  1048576  262144  float  sum  -1{times}{times}"
    return "\n".join([*ranks, _HEADER, row, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""])


def shape(curves: list[Curve]) -> set[tuple[int, int, int]]:
    return {(curve.ranks, curve.hosts, curve.groups) for curve in curves}


NODES = [(0, "n1"), (0, "n1"), (0, "n2"), (0, "n2")]


@pytest.mark.parametrize(
    ("split", "factor", "found"),
    [
        (lambda rank: 0, 1.5, (4, 2, 1)),
        # NCCL_TESTS_SPLIT=DIV 2: each host by itself. MOD 2: each rank with its like on the other host.
        (lambda rank: rank // 2, 1.0, (2, 1, 1)),
        (lambda rank: rank % 2, 1.0, (2, 2, 2)),
    ],
)
def test_groups_are_curves_of_what_they_are(
    split: Callable[[int], int], factor: float, found: tuple[int, int, int]
) -> None:
    places = [(split(rank), host) for rank, (_, host) in enumerate(NODES)]
    assert shape(nccl_curves(table(places, factor), "x")) == {found}


@pytest.mark.parametrize(
    ("places", "factor", "code", "values"),
    [
        ([(0, "n1"), (0, "n2"), (1, "n1"), (1, "n1")], 1.0, "HT-nccl-tests-not-usable", {}),
        ([(0, "n1"), (1, "n2"), (1, "n2")], 1.0, "HT-nccl-tests-not-usable", {"sizes": "1, 2"}),
        ([(0, "n1"), (0, "n1"), (0, "n1"), (0, "n2")], 1.5, "HT-nccl-tests-not-usable", {"ranks": "1 and 3"}),
        ([(0, "n1"), (0, "n1"), (1, "n1"), (1, "n1")], 1.0, "HT-nccl-tests-not-usable", {"groups": 2}),
        ([(0, "n1"), (0, "n2"), (1, "n1"), (1, "n3")], 1.0, "HT-nccl-tests-not-usable", {}),
        ([(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")], 0.0, "HT-nccl-tests-not-usable", {}),
        ([(0, "n1")], 0.0, "HT-nccl-tests-not-usable", {}),
    ],
)
def test_groups_of_which_one_curve_would_not_tell(
    places: list[tuple[int, str]], factor: float, code: str, values: dict[str, object]
) -> None:
    with refused(code, **values) as wrong:
        nccl_curves(table(places, factor), "x")
    assert wrong.value.hint


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
    with refused("HT-nccl-tests-not-usable", rank=0):
        nccl_curves("\n".join(lines), "x")


def test_several_runs_in_one_file() -> None:
    gather = SPARK.replace("all_reduce_perf", "all_gather_perf").replace("     sum ", "    none ")
    one, two = nccl_curves(SPARK, "x"), nccl_curves(H100, "x")
    assert nccl_curves(SPARK + H100, "x") == [*one, *two]
    assert nccl_curves(gather + SPARK + gather, "x") == one
    with refused("HT-nccl-tests-not-usable", where="x:2", found="the test is all_gather_perf"):
        nccl_curves(gather + gather, "x")
    with refused("HT-nccl-tests-damaged", where="x:47"):
        nccl_curves(SPARK + H100[:-200], "x")
    header = next(line for line in SPARK.splitlines() if "busbw" in line)
    with refused("HT-nccl-tests-damaged") as caught:
        nccl_curves(SPARK.replace("# Out of bounds", f"{header}\n# Out of bounds"), "x")
    assert "a second table" in caught.value.message


@pytest.mark.parametrize("column", ["algbw", "busbw"])
def test_a_table_whose_second_times_have_no_rates(column: str) -> None:
    before, after = _HEADER.rsplit(column, 1)
    damaged = table(NODES, 1.5).replace(_HEADER, f"{before}\0{column}{after}")
    with refused("HT-nccl-tests-damaged", column=column):
        nccl_curves(damaged, "x")


@pytest.mark.parametrize(
    ("old", "new", "code", "values"),
    [
        # Of two ranks, a reduce has the bus bandwidth of an all-reduce; its root tells it.
        (
            "     sum      -1",
            "     sum       0",
            "HT-nccl-tests-not-usable",
            {"found": "a test with the root 0, no all-reduce"},
        ),
        (
            "     sum      -1",
            "    none      -1",
            "HT-nccl-tests-not-usable",
            {"found": "a test without an operation, no all-reduce"},
        ),
        # A reduce-scatter of two ranks: half of it.
        ("6.98    6.98", "6.98    3.49", "HT-nccl-tests-not-usable", {"factor": 0.5}),
    ],
)
def test_other_collectives_without_their_name(old: str, new: str, code: str, values: dict[str, object]) -> None:
    nameless = "".join(line + "\n" for line in SPARK.splitlines() if "Collective test" not in line)
    rows = nameless.replace("0.52    0.52", "6.98    6.98")
    assert old in rows
    with refused(code, **values):
        nccl_curves(rows.replace(old, new), "x")


def report(**changed: Any) -> dict[str, Any]:
    """A report as src/util.cu of nccl-tests 2.19.6 writes it: two processes of two GPUs each."""
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 7,
            "hostname": host,
            "device": 0,
            "device_hex": "0000:1b:00",
            "device_info": "NVIDIA H200",
        }
        for rank, host in ((0, "n1"), (2, "n2"))
    ]
    times = {"time": 400.0, "alg_bw": 2.62, "bus_bw": 3.93, "nwrong": 0.0}
    found = {
        "version": 2,
        "args": ["./build/all_reduce_perf", "-g", "2"],
        "env": ["HOME=/root"],
        "nccl_version": 22807,
        "config": {"nthreads": 1, "ngpus": 2, "devices": devices},
        "results": [
            {"size": 0, "count": 0, "type": "float", "redop": "sum", "root": "    -1", "out_of_place": times},
            {
                "size": 1 << 20,
                "count": 1 << 18,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": times,
                "in_place": {**times, "time": 410.0, "nwrong": None},
            },
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
    }
    return {**found, **changed}


def test_json_of_nccl_tests(tmp_path: Path) -> None:
    file = tmp_path / "nccl.json"
    file.write_text(json.dumps(report()))
    out, inside = read_calibration([file]).curves
    assert (out.engine, out.ranks, out.hosts, out.groups, out.gpu) == ("nccl", 4, 2, 1, "NVIDIA H200")
    assert out.points == ((1 << 20, pytest.approx(400e-6)),)
    assert (inside.engine, inside.points[0][1]) == ("nccl, in-place", pytest.approx(410e-6))


def config(**changed: Any) -> dict[str, Any]:
    return {**report()["config"], **changed}


def test_json_of_one_process_and_of_groups() -> None:
    device = report()["config"]["devices"][0]
    row = {**report()["results"][1], "out_of_place": {"time": 400.0, "alg_bw": 2.62, "bus_bw": 4.585}, "in_place": None}
    eight = report(config=config(ngpus=8, devices=[device]), results=[row])
    assert shape(nccl_curves(json.dumps(eight), "x")) == {(8, 1, 1)}
    row["out_of_place"]["bus_bw"] = 2.62
    places = [{**device, "rank": rank, "group": rank % 2, "hostname": f"n{rank // 2}"} for rank in range(4)]
    split = report(config=config(ngpus=1, devices=places), results=[row])
    assert shape(nccl_curves(json.dumps(split), "x")) == {(2, 2, 2)}


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        ({"args": ["all_gather_perf"]}, "HT-nccl-tests-not-usable", {"found": "the test is all_gather_perf"}),
        ({"out_of_bounds": {"count": 3, "okay": "false"}}, "HT-nccl-tests-wrong-results", {"where": "x", "count": 3}),
        (
            {"results": [{**report()["results"][1], "out_of_place": {"cpu_time": 3.0, "alg_bw": 1, "bus_bw": 1}}]},
            "HT-nccl-tests-damaged",
            {"key": "results.0.out_of_place.time", "problem": "times of the CPU (-C)"},
        ),
        (
            {
                "results": [
                    {**report()["results"][1], "out_of_place": {"time": 3.0, "alg_bw": 1, "bus_bw": 1, "nwrong": 2}}
                ]
            },
            "HT-nccl-tests-wrong-results",
            {"where": "x: results[0]", "count": 2},
        ),
        (
            {"results": [{**report()["results"][1], "root": "     0"}]},
            "HT-nccl-tests-not-usable",
            {"found": "a test with the root 0, no all-reduce"},
        ),
        ({"results": []}, "HT-nccl-tests-damaged", {"where": "x"}),
        ({"config": config(devices=report()["config"]["devices"] * 2)}, "HT-nccl-tests-not-usable", {"where": "x"}),
        ({"config": config(ngpus=1)}, "HT-nccl-tests-damaged", {"missing": 1, "count": 3}),
        ({"config": config(devices=[])}, "HT-nccl-tests-damaged", {"key": "config.devices"}),
    ],
)
def test_wrong_json(changed: dict[str, Any], code: str, values: dict[str, object]) -> None:
    with refused(code, **values) as wrong:
        nccl_curves(json.dumps(report(**changed)), "x")
    assert wrong.value.message.startswith("x") and wrong.value.hint
    assert "HOME" not in str(wrong.value.message)


def test_json_of_a_run_that_was_ended() -> None:
    cut = report()
    del cut["out_of_bounds"]
    with refused("HT-nccl-tests-damaged", where="x", key="out_of_bounds"):
        nccl_curves(json.dumps(cut), "x")
