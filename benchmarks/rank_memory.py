"""Measures a rank's memory in training: as replicas, with ZeRO's stages, with recomputation and with tp.

``MALLOC_MMAP_THRESHOLD_=131072 hpctrain run benchmarks/rank_memory.py -np 4 --backend mpi -- gpt 8``: the network, gpt
or transformer, and rows of 64 tokens for each rank. One variant after the other is trained for a few steps of AdamW,
over NCCL if every rank has a GPU; else over Gloo, which uses no memory that ranks share, and that would be counted for
each of them. Rank 0 prints a row of JSON for each, in bytes of the rank that has most: ``parameters``, ``gradients``,
``optimizer``, ``state`` (the most of their sum at one moment), ``formula``, ``ratio_to_formula``, ``ratio_to_replicas``
and ``rest_of_peak``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mesh_steps import shared_workload
from mpi4py import MPI
from torch import nn

import hpctrain as ht
from hpctrain.common.recipes.gpt import BENCHED
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.control.predict.memory import StateBytes, zero_bytes
from hpctrain.worker.adapters.torch.tensor_pieces import local_tensor
from hpctrain.worker.bench.workloads import BenchWorkload
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.train.mesh_trainer import plan_of

# The optimizer's state exists from the second step on.
_STEPS = 3
_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of dividing a training; stage 0 of ZeRO divides nothing."""

    mesh: Mesh
    zero: int = 0
    recompute: bool = False


def variants(model: str, ranks: int) -> dict[str, Variant]:
    """The variants that are possible for so many ranks, by name."""
    replicas, shards = Mesh().at(ranks), Mesh(dp_shard=ranks).at(ranks)
    found = {"replicas": Variant(mesh=replicas), "replicas, recompute": Variant(mesh=replicas, recompute=True)}
    if ranks == 1:
        return found
    found |= {f"ZeRO {stage}": Variant(mesh=shards, zero=stage) for stage in (1, 2, 3)}
    found["ZeRO 3, recompute"] = Variant(mesh=shards, zero=3, recompute=True)
    if model == "gpt" and BENCHED.heads % ranks == 0:
        found[f"tp {ranks}"] = Variant(mesh=Mesh(tp=ranks).at(ranks))
    if model == "gpt" and ranks % 2 == 0 and ranks > 2:
        found["tp 2, ZeRO 3"] = Variant(mesh=Mesh(dp_shard=-1, tp=2).at(ranks), zero=3)
    return found


class ProcessMemory:
    """The memory of this process: resident memory, or on a GPU what PyTorch has allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settled(self) -> int:
        """The bytes in use now, after unused memory was freed."""
        gc.collect()
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        ctypes.CDLL(None).malloc_trim(0)
        return self._status("VmRSS")

    def begin(self) -> None:
        """Reset the peak."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most bytes in use since :meth:`begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._status("VmHWM")

    def _status(self, key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) * _KIB


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes that this rank holds now, by kind.

    While FSDP2 has gathered a module's parameters, the module holds these, and the optimizer this rank's part.
    """
    parameters = [*model.parameters(), *(each for group in optimizer.param_groups for each in group["params"])]
    kept = (each for slots in optimizer.state.values() for each in slots.values() if isinstance(each, torch.Tensor))
    return {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes(each.grad for each in parameters if each.grad is not None),
        "optimizer": _nbytes(kept),
    }


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' storages, each counted once."""
    storages = [local_tensor(each).untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def measure(comm: Communicator, variant: Variant, model: str, batch: int, device: torch.device) -> dict[str, Any]:
    """This rank's most bytes of each kind, of all kinds at one moment (``state``), and the peak of the process.

    The moments are the ends of forward pass, backward pass and update.
    """
    work = shared_workload(comm, variant.mesh, model, batch=batch)
    work = replace(work, x=work.x.to(device), y=work.y.to(device))
    process = ProcessMemory(device)
    before = process.settled()
    network = work.build().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    plan = plan_of(model, zero=variant.zero or 3, recompute=variant.recompute)  # type: ignore[arg-type]
    network, optimizer = ht.distribute(network, optimizer, comm=comm, plan=plan)
    moments: list[dict[str, int]] = []
    for _ in range(_STEPS):
        moments = train(work, network, optimizer)
        process.begin()
    train(work, network, optimizer)
    peak = process.peak() - before
    found = {kind: max(each[kind] for each in moments) for kind in moments[0]}
    return {**found, "state": max(sum(each.values()) for each in moments), "peak": peak}


def train(work: BenchWorkload, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, int]]:
    """Train one step; returns the :func:`state` after its forward pass, backward pass and update."""
    optimizer.zero_grad()
    loss = work.loss(model)
    forward = state(model, optimizer)
    loss.backward()
    backward = state(model, optimizer)
    optimizer.step()
    return [forward, backward, state(model, optimizer)]


def own_parameters(work: BenchWorkload, mesh: Mesh) -> float:
    """How many parameters a rank holds: tp divides the linear layers of a GPT's blocks."""
    whole, parts = sum(each.numel() for each in work.build().parameters()), BENCHED.transformer.parameters
    divided = parts.layers * (parts.attention + parts.mlp) if mesh.tp > 1 else 0
    return whole - divided + divided / mesh.tp


def main(model: str, batch: str) -> None:
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    on_gpus = MPI.COMM_WORLD.allreduce(torch.cuda.device_count() >= local.size, MPI.LAND)
    comm = ht.init("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    chosen = variants(model, comm.size)
    # A first run, so that memory which libraries take at their first use counts for no variant.
    measure(comm, chosen["replicas"], model, int(batch), device)
    each = StateBytes(parameters=4, gradients=4, optimizer=8)
    replicas = 0
    for name, variant in chosen.items():
        measured = comm.allgather_object(measure(comm, variant, model, int(batch), device))
        most = {kind: max(rank[kind] for rank in measured) for kind in measured[0]}
        work = shared_workload(comm, variant.mesh, model, batch=1)
        stage: Any = variant.zero
        own = own_parameters(work, variant.mesh)
        formula = zero_bytes(own, each, stage=stage, ranks=variant.mesh.dp_shard).total
        replicas = replicas or most["state"]
        row = {
            "variant": name,
            **most,
            "formula": formula,
            "ratio_to_formula": most["state"] / formula,
            "ratio_to_replicas": most["state"] / replicas,
            "rest_of_peak": most["peak"] - most["state"],
        }
        if comm.rank == 0:
            print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
