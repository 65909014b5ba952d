"""``hpctrain bench`` on real ranks, as short as can be."""

from __future__ import annotations

import json
from pathlib import Path

from launching import Launch


def test_allreduce_of_all_engines(hpctrain: Launch, tmp_path: Path):
    result = hpctrain(
        "bench", "allreduce", "-np", "2", "--sizes", "4,1M", "--rounds", "1", "--json", "--plot", "times.png"
    )
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert measured["left_out"] == {}
    rows = {(row["engine"], row["bytes"]): row for row in measured["rows"]}
    engines = ("copy", "mpi", "MPI_Allreduce", "gloo", "horovod")
    assert set(rows) == {(engine, size) for engine in engines for size in (4, 1 << 20)}
    for row in rows.values():
        assert row["ranks"] == 2
        assert 0 < row["median_s"] < 60
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_of_each_variant(hpctrain: Launch):
    result = hpctrain("bench", "step", "-np", "2", "--model", "digits", "--rounds", "1", "--batch", "1", "--json")
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert measured["left_out"].keys() <= {"nccl"}
    assert {row["variant"] for row in measured["rows"]} == {
        "no communication",
        "horovod by hand",
        "ddp over gloo",
        "hpctrain over horovod",
        "hpctrain over gloo",
        "hpctrain over mpi",
        "of it the guard",
        "all supervision",
    }
    for row in measured["rows"]:
        assert row["ratio_to_limit"] > 0
        assert row["ratio_to_ddp"] > 0


def test_a_checkpoint_and_what_it_is_measured_against(hpctrain: Launch, tmp_path: Path):
    result = hpctrain("bench", "checkpoint", "-np", "2", "--model", "resnet18", "--rounds", "1", "--json")
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    # 11.7 million parameters and as many of momentum, statistics and random states
    assert 93_500_000 < measured["bytes"] < 94_000_000
    rows = {row["variant"]: row for row in measured["rows"]}
    assert list(rows) == [
        "torch.save",
        "torch.save and fsync",
        "disk, one file",
        "disk, a file a rank",
        "hpctrain, training waits",
        "hpctrain, writing",
    ]
    for row in rows.values():
        assert 0 < row["median_s"] < 60
        assert row["ratio_to_torch_save"] > 0
    assert rows["hpctrain, writing"]["share_of_disk"] > 0
    # nothing of it is left
    assert not list(tmp_path.glob("hpctrain-bench-*"))
