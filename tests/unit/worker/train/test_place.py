"""What a rank takes of its place, on machines that fit the node map and on others."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pynvml
import pytest

from hpctrain.common.cluster.node_map import Slot
from hpctrain.common.run.plan import Plan, Script, Slots, Start
from hpctrain.worker.train.place import bind_rank, missing_adapter, shared_cores, unfit_cores


def machine(
    root: Path, *, nodes: dict[int, str] | None = None, siblings: dict[int, str] | None = None, allowed: str = "0-15"
) -> Path:
    """/sys and /proc of a machine with NUMA nodes, hardware threads and the CPUs that a process may use."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tpython\nCpus_allowed_list:\t{allowed}\n")
    system = root / "sys/devices/system"
    (system / "cpu").mkdir(parents=True)
    (system / "cpu/online").write_text("0-15\n")
    for index, cpus in (nodes or {}).items():
        (system / f"node/node{index}").mkdir(parents=True)
        (system / f"node/node{index}/cpulist").write_text(f"{cpus}\n")
    for cpu, threads in (siblings or {}).items():
        (system / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{threads}\n")
    return root


def adapter(root: Path, name: str, *, up: bool = True) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "state").write_text("4: ACTIVE\n" if up else "1: DOWN\n")


def test_cpus_that_are_not_online_are_not_bound_to(tmp_path: Path) -> None:
    """The kernel allows CPUs that could be added, and refuses to bind a thread to such alone."""
    root = machine(tmp_path, nodes={0: "0-15"}, allowed="0-255")
    assert "core 32 " in unfit_cores([slot(32, 33, numa=1)], 0, root)
    assert unfit_cores([slot(14, 15, numa=0)], 0, root) == ""


def test_adapters_that_are_not_up(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0")
    adapter(tmp_path, "mlx5_7", up=False)
    folder = tmp_path / "sys/class/infiniband"
    for devices, missing in (
        (["mlx5_0"], ""),
        (["mlx5_0:1"], ""),
        ([], ""),
        (["mlx5_0", "rail1"], "rail1:1"),
        (["mlx5_0:2"], "mlx5_0:2"),
        (["mlx5_7"], "mlx5_7:1"),
    ):
        assert missing_adapter(devices, folder) == missing


def slot(*cores: int, numa: int | None = None) -> Slot:
    return Slot(gpu=None, adapter=None, cores=cores, numa=numa)


def test_cores_that_fit(tmp_path: Path) -> None:
    threads = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    root = machine(tmp_path, nodes={0: "0-3,8-11", 1: "4-7,12-15"}, siblings=threads, allowed="0-6,8-15")
    assert unfit_cores([slot(0, 1, numa=0), slot(2, 3, numa=0)], 0, root) == ""
    # Both threads of a core in one rank are its own.
    assert unfit_cores([slot(0, 8, numa=0), slot(1, numa=0)], 0, root) == ""
    assert "core 7 " in unfit_cores([slot(6, 7)], 0, root)
    assert "NUMA node" in unfit_cores([slot(3, 4, numa=0)], 0, root)
    # A container may show fewer nodes than the host has.
    assert unfit_cores([slot(0, numa=2)], 0, root) == ""
    places = [slot(0, 1), slot(2, 8)]
    for rank, cores in enumerate((["0", "8"], ["8", "0"])):
        assert re.findall("core ([0-9])", unfit_cores(places, rank, root)) == cores


def test_ranks_share_the_cores_of_their_node(tmp_path: Path) -> None:
    threads = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    root = machine(tmp_path, nodes={0: "0,2,4,6,8,10,12,14", 1: "1,3,5,7,9,11,13,15"}, siblings=threads)
    places = [slot(numa=0), slot(numa=1), slot(numa=0), slot()]
    shares = [shared_cores(places, local, root) for local in range(4)]
    assert shares == [("", (0, 2)), ("", (1, 3, 5, 7)), ("", (4, 6)), ("", ())]
    # Not those that the plan gives to another rank, nor their threads.
    assert shared_cores([slot(numa=0), slot(8)], 0, root) == ("", (2, 4, 6))
    crowded = [slot(numa=0)] * 5
    for slots, numbers in ((crowded, ["5", "4", "0"]), ([slot(numa=7)], ["1", "0", "7"])):
        assert re.findall("[0-9]+", shared_cores(slots, 0, root)[0]) == numbers


def plan(*places: Slot) -> Plan:
    host = Slots(host="n1", slots=len(places), places=places)
    return Plan(script=Script(path=Path("train.py")), ranks=len(places), hosts=(host,), threads_per_rank=1)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Cores that the process was bound to."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: found.append(tuple(cores)))
    for name in ("NCCL_IB_HCA", "UCX_NET_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        # Removed again what the rank sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


def test_a_rank_takes_what_fits(
    tmp_path: Path, bound: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine(tmp_path, nodes={0: "0-15"})
    adapter(root, "mlx5_0")
    adapter(root, "mlx5_1")
    places = [
        Slot(gpu=rank, adapter=f"mlx5_{rank}", cores=(2 * rank, 2 * rank + 1), numa=0, devices=(f"mlx5_{rank}",))
        for rank in (0, 1)
    ]
    bind_rank(plan(*places), 1, root)
    assert (os.environ["NCCL_IB_HCA"], os.environ["UCX_NET_DEVICES"]) == ("=mlx5_0,mlx5_1", "mlx5_1:1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert bound == [(2, 3)]
    assert capsys.readouterr().err == ""


def test_a_rank_says_what_it_leaves_out(
    tmp_path: Path, bound: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine(tmp_path, nodes={0: "0-15"}, allowed="4-7")
    bind_rank(plan(Slot(gpu=0, adapter="mlx5_0", cores=(0, 1), numa=0, devices=("mlx5_0",))), 0, root)
    assert "NCCL_IB_HCA" not in os.environ and "UCX_NET_DEVICES" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert bound == []
    first, second = capsys.readouterr().err.splitlines()
    assert "mlx5_0:1 " in first and "core 0" in second


def test_what_the_user_has_set_is_not_judged(
    tmp_path: Path, bound: list[tuple[int, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mine")
    monkeypatch.setenv("UCX_NET_DEVICES", "mine:1")
    bind_rank(plan(Slot(gpu=0, adapter="mlx5_0", cores=(), devices=("mlx5_0",))), 0, machine(tmp_path))
    assert (os.environ["NCCL_IB_HCA"], os.environ["UCX_NET_DEVICES"]) == ("mine", "mine:1")
    assert (bound, capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "1", "0"]), ("3", ["3"] * 3), ("", [""] * 3)])
def test_a_rank_that_shares_gpus_sees_one(
    monkeypatch: pytest.MonkeyPatch, bound: list[tuple[int, ...]], visible: str | None, expected: list[str]
) -> None:
    """Cores are left as they are."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4 if visible else 2)
    shared = Plan(
        script=Script(path=Path("train.py")),
        ranks=3,
        hosts=(Slots(host="n1", slots=3),),
        threads_per_rank=1,
        start=Start(share_gpus=True),
    )
    found = []
    for rank in range(3):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        bind_rank(shared, rank)
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert (found, bound) == (expected, [])
