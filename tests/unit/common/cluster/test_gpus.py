"""How many GPUs a process may use, and the backend that ``auto`` stands for."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from hpctrain.common.cluster.gpu_models import buses, gpus
from hpctrain.common.cluster.gpus import (
    fitting_backend,
    gpu_of,
    only_gpu,
    own_gpu,
    require_shareable,
    sharing_variables,
    usable_gpus,
)
from support.refusals import refused


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("2,-1,3", 1), ("GPU-8a,GPU-8b,GPU-8c", 3), ("0,1,9,2", 2)],
)
def test_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, devices: str | None, expected: int) -> None:
    calls = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert usable_gpus({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}) == expected
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(("kind", "expected"), [("0x038000", True), ("0x030000", False)])
def test_gpus_of_intel_are_named_where_none_is_used(tmp_path: Path, kind: str, expected: bool) -> None:
    """The graphics of a processor (0x0300) are no GPUs to train on."""
    for number, vendor in enumerate(("0x15b3", "0x8086")):
        device = tmp_path / f"0000:{number}"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    backend, reason = fitting_backend("torch", 0, 2, "n1", devices=tmp_path)
    assert backend == "mpi" and ("Intel" in reason) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("1", "GPU-1"), ("1,7", "GPU-1"), ("GPU-8a", "GPU-8a"), ("MIG-a", None), ("0,1", None), ("", None), (None, None)],
)
def test_the_only_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, devices: str | None, expected: str | None) -> None:
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert only_gpu() == expected


def test_without_nvidias_driver_amds_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert usable_gpus({}, tmp_path) == 0
    # A processor, and two GPUs of AMD's driver.
    for number, units in enumerate([0, 304, 304]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n"
        )
    assert usable_gpus({}, tmp_path) == 2
    assert usable_gpus({"ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert usable_gpus({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": ""}, tmp_path) == 0


@pytest.mark.parametrize(
    ("framework", "gpus", "ranks", "expected"),
    [
        ("torch", 0, 2, ("mpi", "no GPU on n1")),
        ("keras", 0, 2, ("mpi", "no GPU on n1")),
        ("torch", 1, 2, ("mpi", "1 GPU for 2 ranks on n1")),
        (None, 3, 4, ("mpi", "3 GPUs for 4 ranks on n1")),
        ("torch", 4, 4, ("nccl", "PyTorch, a GPU for each rank on n1")),
        ("keras", 4, 2, ("horovod", "Keras, a GPU for each rank on n1")),
        (None, 2, 2, ("horovod", "a script of either framework, a GPU for each rank on n1")),
    ],
)
def test_the_fitting_backend(framework: str | None, gpus: int, ranks: int, expected: tuple[str, str]) -> None:
    assert fitting_backend(framework, gpus, ranks, "n1") == expected


@pytest.mark.parametrize(
    ("ranks", "gpus", "shared", "expected"),
    [
        (2, 4, False, [0, 1]),
        (2, 1, False, [None, None]),
        (2, 1, True, [0, 0]),
        (5, 2, True, [0, 1, 0, 1, 0]),
        (2, 0, True, [None, None]),
        # A batch system that shows each rank one GPU.
        (3, 1, True, [0, 0, 0]),
    ],
)
def test_the_gpu_of_each_rank(ranks: int, gpus: int, shared: bool, expected: list[int | None]) -> None:
    assert [gpu_of(rank, ranks, gpus, shared=shared) for rank in range(ranks)] == expected


@pytest.mark.parametrize(
    ("visible", "present", "expected"),
    [
        (None, 1, ["0", "0", "0"]),
        (None, 2, ["0", "1", "0"]),
        ("3", 4, ["3", "3", "3"]),
        ("2, 3", 4, ["2", "3", "2"]),
        ("GPU-8a", 4, ["GPU-8a"] * 3),
        ("1,-1,2", 4, ["1", "1", "1"]),
        # Two slices of one GPU, of which CUDA shows a process one.
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b", "MIG-a"]),
        ("", 4, [None] * 3),
        (None, 0, [None] * 3),
    ],
)
def test_what_a_rank_that_shares_gpus_sees(visible: str | None, present: int, expected: list[str | None]) -> None:
    assert [own_gpu(rank, visible, present) for rank in range(3)] == expected


def test_nccl_takes_no_two_ranks_for_ranks_of_one_host() -> None:
    names = {sharing_variables(rank, host)["NCCL_HOSTID"] for rank in range(3) for host in ("n1", "n2")}
    assert len(names) == 6
    assert sharing_variables(0, "n1")["NCCL_SOCKET_IFNAME"] == "lo"


def test_where_gpus_can_be_shared() -> None:
    require_shareable([("n1", 2, 1)])
    require_shareable([("n1", 4, 1)] * 4)
    with refused("HT-gpus-not-shareable", host="n1"):
        require_shareable([("n1", 2, 0)])
    with refused("HT-gpus-not-shareable", "2 GPUs for 2 ranks", host="n1"):
        require_shareable([("n1", 2, 2)])
    with refused("HT-gpus-not-shareable", "n2 has ranks", host="n1"):
        require_shareable([("n1", 2, 1), ("n2", 2, 1)])


def test_the_bus_of_every_gpu_is_known() -> None:
    assert {each.bus for each in gpus().values()} <= buses().keys()
