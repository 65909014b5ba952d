"""Measured curves: `hpctrain bench allreduce --json`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.measurements import Curve, read_calibration
from hpctrain.report.benchmarks import allreduce_rows
from support.refusals import refused


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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "HT-calibration-not-valid"),
        ("# nccl-tests version 2.20.0", "HT-calibration-not-valid"),
        ("[1]", "HT-calibration-not-valid"),
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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xff")
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
    assert (found.at(1), found.at(1e3)) == (1e-5, 1e-5)
    assert found.at(1e7) == pytest.approx(2e-2)


@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-7, 1e3)), min_size=1, unique_by=lambda point: point[0]))
def test_a_curve_passes_through_its_points(points: list[tuple[float, float]]) -> None:
    found = curve(*sorted(points))
    for size, seconds in points:
        assert found.at(size) == pytest.approx(seconds)
        assert min(s for _, s in points) * (1 - 1e-9) <= found.at(size * 0.7)
