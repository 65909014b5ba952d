"""A rank of ``topology verify``: its adapter and port, from /sys trees built for the test, and what its measurements
of a machine that others use come to."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hpctrain.control.topology.verify import End, Flow, compare, rounds
from hpctrain.worker.programs import links

UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(links, "_ADAPTERS", tmp_path)
    for name in ("MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "as-it-was")
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
    assert os.environ["UCX_NET_DEVICES"] == "as-it-was"


def test_a_host_of_bonds_and_virtual_functions_measures_its_bonds(
    adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    add_port(adapters, "mlx5_0", 1, UP, "Ethernet")
    add_port(adapters, "mlx5_bond_1", 1, UP, "Ethernet")
    for name, layer in (("mlx5_bond_0", "Ethernet"), ("mlx5_1", "InfiniBand")):
        add_port(adapters, name, 1, UP, layer)
        (adapters / name / "device/physfn").mkdir(parents=True)
    assert (links.choose_adapter(), os.environ["UCX_NET_DEVICES"]) == ("mlx5_bond_1", "mlx5_bond_1:1")


class SharedMachine:
    """Stands in for MPI on rank 0: any measurement may be slowed down by others, and some senders always are."""

    def __init__(self, seed: int, slow: int | None) -> None:
        self.choose, self.slow = random.Random(seed), slow
        self.pairs: list[tuple[int, int]] = []

    def gather(self, _: object) -> list[dict[str, float]]:
        return [
            {"source": source, "target": target, "bandwidth": speed}
            for source, target in self.pairs
            for speed in [self.speed(source, target)]
        ]

    def speed(self, source: int, target: int) -> float:
        disturbed = self.choose.uniform(0.2, 1) if self.choose.random() < 0.35 else self.choose.uniform(0.95, 1)
        return 10e9 * disturbed * (0.4 if self.slow in (source, target) else 1)


def judged(monkeypatch: pytest.MonkeyPatch, ranks: int, seed: int, slow: int | None) -> set[str]:
    """The names of what is slow, in one direction or in both."""
    machine = SharedMachine(seed, slow)
    monkeypatch.setattr(links, "measure", lambda comm, pairs, size: setattr(comm, "pairs", pairs))
    flows = [
        Flow(
            round=flow["round"],
            source=End(host=f"h{flow['source']}", device="mlx5_0"),
            target=End(host=f"h{flow['target']}", device="mlx5_0"),
            bandwidth=flow["bandwidth"],
            spread=flow["spread"],
        )
        for flow in links.measure_all(machine, rounds(ranks), 1)
    ]
    return {fault.name for fault in compare(flows)}


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_busy_machine_raises_no_alarm(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(judged(monkeypatch, ranks, seed, None) for seed in range(200))


@pytest.mark.slow
def test_a_slow_host_of_a_busy_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(judged(monkeypatch, 8, seed, 5) == {"h5"} for seed in range(200))


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_slow_host_among_few_is_named_on_a_busy_machine(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(judged(monkeypatch, ranks, seed, 1) == {"h1"} for seed in range(200))


@pytest.mark.parametrize(
    ("seconds", "messages", "repeats"), [(1e-4, 8, 5), (2.5e-3, 4, 5), (0.02, 1, 2), (0.045, 1, 1), (3, 1, 0)]
)
def test_a_slow_link_makes_fewer_messages_do(seconds: float, messages: int, repeats: int) -> None:
    assert links.affordable_messages(seconds) == (messages, repeats)
