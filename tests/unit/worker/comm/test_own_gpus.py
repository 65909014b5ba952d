"""Ranks that see one GPU each, as srun --gpus-per-task=1 starts them: their own, or one for all."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hpctrain.worker.comm import connecting, torch_distributed
from hpctrain.worker.train.torch_forward import rank_device
from support.refusals import refused

OWN = [("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-c")]
SHARED = [("n1", "GPU-a"), ("n1", "GPU-a"), ("n2", "GPU-c")]
UNKNOWN = [("n1", None), ("n1", "GPU-b"), ("n2", "GPU-c")]


def second_rank(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str | None]], gpus: int) -> Any:
    """The second rank of its host, where PyTorch sees so many GPUs."""
    comm: Any = SimpleNamespace(host="n1", rank=1, local_rank=1, local_size=2, in_host_memory=False, backend="nccl")
    # The GPUs that ranks see alone, and anything else, which is alike on all.
    comm.allgather_object = lambda own: seen if type(own) is tuple and len(own) == 2 else [own]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return comm


def taken(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str | None]], gpus: int = 1) -> list[int]:
    """The GPU that rank 1 takes, the second of its host."""
    comm = second_rank(monkeypatch, seen, gpus)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    torch_distributed._take_gpu(comm)
    return chosen


def test_a_rank_takes_the_gpu_that_it_alone_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, OWN) == [0]
    assert taken(monkeypatch, UNKNOWN, gpus=2) == [1]
    for seen in (SHARED, UNKNOWN):
        with refused("HT-gpus-too-few", host="n1"):
            taken(monkeypatch, seen)


@pytest.mark.parametrize(("seen", "gpus", "device"), [(OWN, 1, "cuda:0"), (UNKNOWN, 2, "cuda:1"), (UNKNOWN, 0, "cpu")])
def test_a_recipe_trains_on_the_gpu_that_its_rank_took(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str | None]], gpus: int, device: str
) -> None:
    comm = second_rank(monkeypatch, seen, gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert rank_device(comm) == torch.device(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    comm.allgather_object = lambda own: SHARED if type(own) is tuple and len(own) == 2 else [own]
    with refused("HT-gpus-too-few", host="n1", ranks=2, gpus=1):
        rank_device(comm)


@pytest.mark.parametrize(
    ("seen", "script", "counted"), [(OWN, "torch", 1), (SHARED, "torch", 2), (UNKNOWN, "torch", 2), (OWN, None, 2)]
)
def test_auto_counts_a_gpu_for_each(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str | None]], script: str | None, counted: int
) -> None:
    pytest.importorskip("mpi4py")
    if script == "torch":
        monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    monkeypatch.setattr(connecting, "_fitting", lambda framework, ranks: (framework, ranks))
    node = SimpleNamespace(size=2, allgather=lambda own: [gpu for host, gpu in seen if host == "n1"], Free=lambda: None)
    world: Any = SimpleNamespace(Split_type=lambda kind: node, allgather=lambda own: [own])
    assert connecting._automatic(world) == (script, counted)
