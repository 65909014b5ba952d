"""Measured curves: `hpctrain bench allreduce --json`, and texts of several versions of nccl-tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.measurements import Curve
from hpctrain.control.predict.nccl_tests import nccl_curve
from hpctrain.report.benchmarks import allreduce_rows
from support.refusals import refused

_MEASURED = Path(__file__).parent / "measured"
# 2.13 to 2.16, with rows of a published run on 16 H100
# (https://github.com/lessizzmore/create-a3mega-ztan-fork/blob/main/ztan-NCCL-test-result); its lines of ranks are
# shortened, and the row of 0 bytes is of another run (https://github.com/NVIDIA/nccl-tests/issues/128).
H100 = (_MEASURED / "nccl-tests-2.13.txt").read_text()
# 2.16.7 and later (https://github.com/NVIDIA/dgx-spark-playbooks/pull/103): two lines before, one after, wider columns.
# The first rows of it, with the end that this version prints.
SPARK = (_MEASURED / "nccl-tests-2.20.txt").read_text()
# Up to 2021: no groups, no root, errors of rounding. The header is that of
# https://github.com/tensorflow/tensorflow/issues/30887; the numbers are made up.
OLD = (_MEASURED / "nccl-tests-2.0.txt").read_text()


def test_sixteen_h100() -> None:
    out = nccl_curve(H100, "run.txt")
    assert (out.engine, out.ranks, out.hosts) == ("nccl", 16, 2)
    expected = [(8, 135.8e-6), (1 << 20, 203.2e-6), (1 << 28, 2360.9e-6), (1 << 33, 47535e-6)]
    assert list(out.points) == [(size, pytest.approx(seconds)) for size, seconds in expected]
    assert "run.txt" in out.source and "float sum" in out.source


def test_other_versions() -> None:
    new, old = nccl_curve(SPARK, "new"), nccl_curve(OLD, "old")
    assert (new.ranks, new.hosts, len(new.points)) == (2, 2, 2)
    assert (old.ranks, old.hosts, len(old.points)) == (2, 1, 2)
    assert old.at(2097152) == pytest.approx(346.2e-6)


def test_what_was_not_measured_or_checked() -> None:
    unchecked = SPARK.replace("       0    30", "     N/A    30").replace("  0.27       0", "  0.27     N/A")
    assert nccl_curve(unchecked, "x") == nccl_curve(SPARK, "x")
    half = SPARK.replace("30.33    0.27    0.27", "N/A N/A N/A").replace("30.75    0.53    0.53", "N/A N/A N/A")
    assert nccl_curve(half, "x") == nccl_curve(SPARK, "x")


def test_columns_of_single_iterations_and_a_date() -> None:
    """As since 2.19.2 with its option for them, and with -S."""
    wide = SPARK.replace("#wrong", "#wrong   i_min   i_max   i_p99   i_cv%")
    lines = [
        line.replace("       0    3", "       0 30.1 40.2 39.0 2.1    3") + " 29.0 41.0 40.5 3.0 2026-01-02 03:04:05"
        if line.lstrip()[:1].isdigit() and "sum" in line
        else line + " timestamp"
        if "#wrong" in line
        else line
        for line in wide.splitlines()
    ]
    assert nccl_curve("\n".join(lines), "x") == nccl_curve(SPARK, "x")


@pytest.mark.parametrize(
    ("old", "new", "code", "values"),
    [
        ("# Avg bus bandwidth    : 0.38\n", "", "HT-nccl-tests-not-usable", {}),
        ("0.53    0.53       0", "0.53", "HT-nccl-tests-not-usable", {"where": "f:14"}),
        ("   31.67", "   3l.67", "HT-nccl-tests-not-usable", {"where": "f:14"}),
        ("   31.67", "     nan", "HT-nccl-tests-not-usable", {"where": "f:14"}),
        ("   31.67", "    0.00", "HT-nccl-tests-not-usable", {"where": "f:14"}),
        (
            "0.52       0",
            "0.52       3",
            "HT-nccl-tests-wrong-results",
            {"where": "f:14", "count": "3"},
        ),
        ("values : 0 OK", "values : 248 FAILED", "HT-nccl-tests-wrong-results", {"where": "f:16", "count": "248"}),
        ("starting: all_reduce_perf", "starting: all_gather_perf", "HT-nccl-tests-not-usable", {"where": "f:2"}),
        (
            "16384          4096     float     sum",
            "16384          4096     float    none",
            "HT-nccl-tests-not-usable",
            {},
        ),
        (
            "16384          4096     float",
            "16384          4096      half",
            "HT-nccl-tests-not-usable",
            {},
        ),
        ("Rank  1 Group", "Rank  0 Group", "HT-nccl-tests-not-usable", {"where": "f:7"}),
        ("Rank", "Rang", "HT-nccl-tests-not-usable", {}),
        ("algbw   busbw", "algbw", "HT-nccl-tests-not-usable", {}),
        ("  time", "cputime", "HT-nccl-tests-not-usable", {"where": "f:11"}),
        (SPARK, SPARK + H100, "HT-nccl-tests-not-usable", {}),
    ],
)
def test_damaged_texts(old: str, new: str, code: str, values: dict[str, object]) -> None:
    assert old in SPARK
    with refused(code, **values) as wrong:
        nccl_curve(SPARK.replace(old, new), "f")
    assert wrong.value.hint


def test_bandwidths_that_are_of_another_collective_or_number_of_ranks() -> None:
    lines = H100.splitlines(keepends=True)
    listed = "".join(f"#  Rank {rank} Group  0 Pid 1 on n{rank // 2} device  {rank % 2} [0] X\n" for rank in range(46))
    header = next(line for line in lines if "#       size" in line)
    times = "   20000  429.50  841.10      0"
    # Fast rows tell 46 ranks from 48.
    row = f"  8589934592    2147483648     float     sum      -1 {times} {times}\n"
    for text, code in (
        ("".join(line for line in lines if "gq73" not in line), "HT-nccl-tests-not-usable"),
        ("".join(line for line in lines if "235z" not in line), "HT-nccl-tests-not-usable"),
        (H100.replace("338.82", "169.41"), "HT-nccl-tests-not-usable"),
        (listed + header + row + "# Avg bus bandwidth    : 1\n", "HT-nccl-tests-not-usable"),
    ):
        with refused(code):
            nccl_curve(text, "f")


@given(cut=st.integers(0, len(H100) - 40))
def test_every_text_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(HpctrainError):
        nccl_curve(H100[:cut], "f")


@given(text=st.text())
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        nccl_curve(text, "some file")
    assert caught.value.values["where"].startswith("some file")


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
        nccl_curve(text, "x")
    assert wrong.value.hint


def test_a_table_that_is_whole_is_read() -> None:
    curve = nccl_curve(table(("n1", "n1", "n2", "n2"), 1.5), "x")
    assert (curve.ranks, curve.hosts, curve.points) == (4, 2, ((2**20, pytest.approx(4e-4)),))


def bench(**changed: object) -> str:
    seconds = {1 << 20: {"copy": [1e-4], "mpi": [2e-4], "gloo": [4e-4]}, 1 << 24: {"copy": [1e-3], "mpi": [3e-3]}}
    rows = allreduce_rows(seconds, 4, oversubscribed=False, hosts=2)
    rows[1].update(changed)
    return json.dumps({"cores": 2, "rows": rows})


def curves_of(folder: Path, text: str) -> list[Curve]:
    file = folder / "b.json"
    file.write_text(text)
    return list(read_calibration([file]).curves)


def test_the_rows_of_hpctrains_own_benchmark(tmp_path: Path) -> None:
    curves = {curve.engine: curve for curve in curves_of(tmp_path, bench())}
    assert set(curves) == {"mpi", "gloo"}, "a copy is no all-reduce"
    assert curves["mpi"].points == ((1 << 20, 2e-4), (1 << 24, 3e-3))
    assert (curves["mpi"].ranks, curves["mpi"].hosts) == (4, 2)


def test_ranks_of_one_host_where_rows_have_no_hosts(tmp_path: Path) -> None:
    rows = [{"engine": "mpi", "bytes": 4, "ranks": ranks, "median_s": 1e-6 * ranks} for ranks in (2, 4)]
    found = curves_of(tmp_path, json.dumps({"rows": rows}))
    assert [(curve.ranks, curve.hosts) for curve in found] == [(2, 1), (4, 1)]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "HT-file-not-json"),
        ('{"rows": []}', "HT-calibration-not-valid"),
        ('{"rows": [3]}', "HT-calibration-not-valid"),
        (bench(median_s=-1.0), "HT-calibration-not-valid"),
        (bench(median_s=math.inf), "HT-calibration-not-valid"),
        (bench(median_s=None), "HT-calibration-not-valid"),
        (bench(bytes="4"), "HT-calibration-not-valid"),
        (bench(ranks=True), "HT-calibration-not-valid"),
        (bench(hosts=0), "HT-calibration-not-valid"),
        (bench(hosts=3), "HT-calibration-not-valid"),
        ('{"rows": [{"engine": "copy", "bytes": 4, "ranks": 2, "median_s": 1.0}]}', "HT-calibration-not-valid"),
    ],
)
def test_wrong_json(tmp_path: Path, text: str, code: str) -> None:
    with refused(code, path=tmp_path / "b.json") as wrong:
        curves_of(tmp_path, text)
    assert wrong.value.hint


def test_files_of_either_kind(tmp_path: Path) -> None:
    own, nccl, binary = tmp_path / "own", tmp_path / "nccl", tmp_path / "binary"
    own.write_text(bench())
    nccl.write_text(OLD)
    binary.write_bytes(b"\xff\xff")
    engines = {curve.engine for curve in read_calibration([own, nccl]).curves}
    assert {"mpi", "nccl"} <= engines
    with refused("HT-file-not-text", path=binary):
        read_calibration([binary])
    with refused("HT-file-unreadable", path=tmp_path / "none"):
        read_calibration([tmp_path / "none"])


def curve(*points: tuple[float, float]) -> Curve:
    return Curve(engine="mpi", ranks=2, hosts=1, points=points, source="made up")


def test_between_points_along_a_line_of_logarithms() -> None:
    found = curve((1e3, 1e-5), (1e5, 1e-3), (1e6, 2e-3))
    assert found.at(1e4) == pytest.approx(1e-4)
    assert found.at(10**5.5) == pytest.approx(1e-3 * 2**0.5)


def test_beyond_the_points() -> None:
    found = curve((1e3, 1e-5), (1e6, 2e-3))
    assert (found.at(0), found.at(1), found.at(1e3)) == (0.0, 1e-5, 1e-5)
    assert found.at(1e7) == pytest.approx(2e-2)


@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-7, 1e3)), min_size=1, unique_by=lambda point: point[0]))
def test_a_curve_passes_through_its_points(points: list[tuple[float, float]]) -> None:
    found = curve(*sorted(points))
    for size, seconds in points:
        assert found.at(size) == pytest.approx(seconds)
        assert min(s for _, s in points) * (1 - 1e-9) <= found.at(size * 0.7)
