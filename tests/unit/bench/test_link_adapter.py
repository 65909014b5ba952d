"""The adapter and port that a rank of ``topology verify`` takes, from /sys trees built for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.bench import links

UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(links, "_ADAPTERS", tmp_path)
    for name in ("MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "as it was")
    return tmp_path


def add_port(adapters: Path, adapter: str, port: int, state: str, layer: str = "InfiniBand") -> None:
    folder = adapters / adapter / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    (folder / "link_layer").write_text(layer + "\n")


def test_each_rank_takes_an_adapter_with_an_active_port(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_port(adapters, "mlx5_0", 1, DOWN)
    add_port(adapters, "mlx5_1", 1, UP, "Ethernet")
    add_port(adapters, "mlx5_2", 1, UP)
    add_port(adapters, "mlx5_10", 1, DOWN)
    add_port(adapters, "mlx5_10", 2, UP)
    add_port(adapters, "mlx5_11", 1, "2: INIT")
    chosen = []
    for rank in range(3):
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
        chosen.append((links.choose_adapter(), os.environ["UCX_NET_DEVICES"]))
    assert chosen == [("mlx5_2", "mlx5_2:1"), ("mlx5_10", "mlx5_10:2"), ("mlx5_2", "mlx5_2:1")]


def test_without_an_active_port_the_network_is_left_to_mpi(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_port(adapters, "mlx5_0", 1, DOWN)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert links.choose_adapter() == "rank 1"
    assert os.environ["UCX_NET_DEVICES"] == "as it was"
