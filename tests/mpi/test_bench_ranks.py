"""``hpctrain bench`` on real ranks, as short as can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.control.planning.mesh_plan import SHARDING
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
    assert measured["left_out"].keys() <= {"nccl"}
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


@pytest.mark.long
def test_a_checkpoint_and_what_it_is_measured_against(hpctrain: Launch, tmp_path: Path):
    result = hpctrain("bench", "checkpoint", "-np", "2", "--model", "resnet18", "--rounds", "1", "--json")
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    # 11.7 million parameters and as many of momentum, and statistics
    assert 93_500_000 < measured["bytes"] < 94_000_000
    rows = {row["variant"]: row for row in measured["rows"]}
    wanted = [
        "torch.save",
        "torch.save and fsync",
        "disk, one file",
        "disk, a file a rank",
        "hpctrain, training waits",
        "hpctrain, writing",
    ]
    assert list(rows) == wanted
    for row in rows.values():
        assert 0 < row["median_s"] < 60
        assert row["ratio_to_torch_save"] > 0
    assert rows["hpctrain, writing"]["share_of_disk"] > 0
    # nothing of it is left
    assert not list(tmp_path.glob("hpctrain-bench-*"))


def printed(hpctrain: Launch, script: str, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What rank 0 of a script of benchmarks/ prints."""
    path = Path(__file__).parents[2] / "benchmarks" / script
    options = ("-np", str(ranks), "--backend", "mpi", "--oversubscribe", "--tracking", "none", "--")
    result = hpctrain("run", str(path), *options, *arguments, timeout=600, **SHARDING)
    assert result.returncode == 0, result.stdout
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.thorough
def test_memory_of_four_ranks_is_that_of_the_formulas(hpctrain: Launch):
    rows = {row["variant"]: row for row in printed(hpctrain, "rank_memory.py", 4, "gpt", "1")}
    # GPT of 6 blocks of width 384 (12 w^2 in linear layers, 2 w in normalisations), 2048 tokens, 64 positions
    parameters = 4 * (6 * (12 * 384**2 + 2 * 384) + (2048 + 64 + 1) * 384)
    # Rajbhandari et al. 2020: AdamW keeps twice the parameters
    shares = {"ZeRO 1": (1, 1, 4), "ZeRO 2": (1, 4, 4), "ZeRO 3": (4, 4, 4)}
    for name, (of_parameters, of_gradients, of_state) in shares.items():
        formula = parameters / of_parameters + parameters / of_gradients + 2 * parameters / of_state
        row = rows[name]
        assert row["formula"] == formula
        assert row["state"] == pytest.approx(formula, rel=0.1)
        assert row["optimizer"] == pytest.approx(2 * parameters / 4, rel=0.01)
        # one rank has all of it, as each replica has
        assert row["ratio_to_replicas"] == pytest.approx(formula / (4 * parameters), rel=0.1)
        assert row["rest_of_peak"] > 0
    assert rows["replicas"]["state"] == pytest.approx(4 * parameters, rel=0.01)
    for name in ("tp 4", "tp 2, ZeRO 3"):
        assert rows[name]["ratio_to_formula"] == pytest.approx(1, rel=0.1)


def test_bench_loader_counts_the_stages_of_its_own_processes(hpctrain):
    result = hpctrain("bench", "loader", "--workers", "1", "--rounds", "1", "--image-size", "64", "--json", timeout=600)
    rows = json.loads(result.stdout)["rows"]
    assert (rows[0]["workers"], rows[0]["variant"], len(rows)) == (1, "hpctrain", 2)
    assert rows[-1]["variant"] == "decoding alone" and rows[-1]["share_of_limit"] == 1
    assert all(0 < row["samples_per_s"] < 1e5 for row in rows)
    stages = rows[0]["stages_us"]
    assert stages["decode"] > stages["augment"] > stages["copy"] > 0
    assert rows[1]["stages_us"] is None
    assert rows[0]["processor_us"] == pytest.approx(stages["processor"]) and stages["rank's processor"] > 0
    assert rows[0]["processor_share_of_limit"] == pytest.approx(rows[-1]["processor_us"] / rows[0]["processor_us"])
