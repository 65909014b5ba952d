"""Rows and texts of benchmarks, from times made up for the test."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hpctrain.report.benchmarks import (
    allreduce_rows,
    allreduce_table,
    ratio,
    step_rows,
    step_table,
)


def test_ratios_are_taken_round_by_round():
    # the machine slows down threefold in the last round: medians of times would mislead, those of ratios do not
    seconds = {
        "no communication": [1.0, 1.0, 3.0],
        "horovod by hand": [2.0, 2.0, 6.0],
        "hpctrain over mpi": [1.9, 1.8, 5.4],
    }
    rows = {row["variant"]: row for row in step_rows(seconds)}
    ours = rows["hpctrain over mpi"]
    assert ours["ratio_to_limit"] == pytest.approx(1.8)
    assert ours["ratio_to_horovod"] == pytest.approx(0.9)
    assert ours["ratio_to_ddp"] is None
    assert rows["no communication"]["ratio_to_limit"] == 1.0
    by_hand = rows["horovod by hand"]
    assert by_hand["median_s"] == 2.0
    assert ratio({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 3.0]}, "a", "b") == 2.0


def allreduce_seconds() -> dict[int, dict[str, list[float]]]:
    return {
        size: {
            "copy": [size * 1e-10] * 3,
            "mpi": [2e-5 + size * 2e-10] * 3,
            "MPI_Allreduce": [3e-6 + size * 6e-10] * 3,
            "gloo": [8e-4 + size * 9e-10] * 3,
            "horovod": [1e-3 + size * 7e-10] * 3,
        }
        for size in (1024, 65536, 1 << 22, 102_400_000)
    }


def test_a_row_an_engine_and_size_against_the_copy_and_the_fastest_other():
    rows = {(row["engine"], row["bytes"]): row for row in allreduce_rows(allreduce_seconds(), 4, oversubscribed=True)}
    assert len(rows) == 20
    small, large = rows["mpi", 1024], rows["mpi", 102_400_000]
    assert small["fastest_other"] == large["fastest_other"] == "MPI_Allreduce"
    assert small["ratio_to_fastest_other"] == pytest.approx((2e-5 + 2.048e-7) / (3e-6 + 6.144e-7))
    assert large["ratio_to_copy"] == pytest.approx(2.002, abs=1e-3)
    assert large["share_of_limit"] == pytest.approx(1 / 2.002, abs=1e-3)
    # the copy reduces nothing, so it is nobody's rival, and has none
    assert rows["copy", 1024]["fastest_other"] is None
    assert rows["MPI_Allreduce", 102_400_000]["fastest_other"] == "mpi"
    assert {(row["ranks"], row["rounds"], row["oversubscribed"]) for row in rows.values()} == {(4, 3, True)}


def test_rows_of_hosts_against_the_bound_of_their_links():
    seconds = {size: {**times, "mpi fp16": [size * 1e-10] * 3} for size, times in allreduce_seconds().items()}
    own = {"ranks": 8, "oversubscribed": False, "hosts": 4, "link_bytes_per_s": 125e6}
    rows = {(row["engine"], row["bytes"]): row for row in allreduce_rows(seconds, **own)}
    # Three quarters of a buffer leave a host twice.
    assert rows["mpi", 1024]["link_bound_s"] == pytest.approx(2 * 0.75 * 1024 / 125e6)
    assert rows["gloo", 102_400_000]["ratio_to_link"] == pytest.approx((8e-4 + 0.09216) / 1.2288)
    # A copy uses no link, and half of the bits are no other engine.
    assert rows["copy", 1024]["ratio_to_link"] is None
    assert {row["fastest_other"] for row in rows.values()} == {"mpi", "MPI_Allreduce", None}
    text = text_of(allreduce_table([*rows.values()], cores=2))
    assert "…" not in text
    assert "8 ranks" in text and "4 hosts" in text
    for shown in ("to bound", "0.017", "MPI_Allreduce"):
        assert shown in text
    assert "copy" not in text


def text_of(table: object) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_fit_a_terminal_of_80_columns():
    rows = allreduce_rows(allreduce_seconds(), 4, oversubscribed=True)
    text = text_of(allreduce_table(rows, cores=2))
    assert "…" not in text
    assert "4 ranks" in text and "2 cores" in text
    for shown in ("MPI_Allreduce", "horovod", "102.4 MB", "20.5 ms", "0.33"):
        assert shown in text
    step = step_rows({"no communication": [0.1], "hpctrain over horovod": [0.2], "of it the guard": [0.000123]})
    text = text_of(step_table(step, "steps"))
    assert "2.00" in text
    assert "0.0012" in text
