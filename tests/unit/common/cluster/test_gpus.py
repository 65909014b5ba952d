"""How many GPUs a process may use, and the backend that ``auto`` stands for."""

from __future__ import annotations

import pynvml
import pytest

from hpctrain.common.cluster.gpus import fitting_backend, usable_gpus


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("2,-1,3", 1), ("GPU-8a,GPU-8b,GPU-8c", 3), ("0,1,2,3,4,5", 4)],
)
def test_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, devices: str | None, expected: int) -> None:
    calls = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: calls.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert usable_gpus({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}) == expected
    assert calls == ["init", "shutdown"]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert usable_gpus({}) == 0


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
