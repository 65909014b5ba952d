"""``hpctrain bench`` on real ranks, as short as can be."""

from __future__ import annotations

import json

import pytest

from support.launching import Launch


def test_allreduce_of_all_engines(hpctrain: Launch):
    result = hpctrain("bench", "allreduce", "-np", "2", "--sizes", "4,1M", "--rounds", "1", "--json")
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert measured["left_out"] == {}
    rows = {(row["engine"], row["bytes"]): row for row in measured["rows"]}
    engines = ("copy", "mpi", "MPI_Allreduce", "gloo", "horovod")
    assert set(rows) == {(engine, size) for engine in engines for size in (4, 1 << 20)}
    for row in rows.values():
        assert row["ranks"] == 2
        assert 0 < row["median_s"] < 60


@pytest.mark.long
def test_a_step_of_each_variant(hpctrain: Launch):
    result = hpctrain("bench", "step", "-np", "2", "--model", "digits", "--rounds", "1", "--batch", "1", "--json")
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert measured["left_out"] == {}
    wanted = {
        "no communication",
        "horovod by hand",
        "ddp over gloo",
        "hpctrain over horovod",
        "hpctrain over gloo",
        "hpctrain over mpi",
    }
    assert {row["variant"] for row in measured["rows"]} == wanted
    for row in measured["rows"]:
        assert row["ratio_to_limit"] > 0
        assert row["ratio_to_ddp"] > 0


def test_bench_loader_measures_its_processes(hpctrain):
    result = hpctrain("bench", "loader", "--workers", "1", "--rounds", "1", "--image-size", "64", "--json", timeout=600)
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["workers"], row["variant"]) == (1, "hpctrain") and 0 < row["samples_per_s"] < 1e5
