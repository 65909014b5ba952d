"""Published runs beside MLPerf's: those that the network decides, and single nodes. Read by predictions.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from hpctrain.common.workloads.workload import Workload, load_workload
from hpctrain.control.predict.compute import Device
from hpctrain.control.predict.job import Job
from hpctrain.control.predict.network import stated_network
from hpctrain.worker.tracing.network_trace import trace

_HOROVOD_44 = "https://github.com/horovod/horovod/pull/44"
_HOROVOD_DOCS = "https://horovod.readthedocs.io/en/stable/benchmarks.html"
_TENSORFLOW = "TensorFlow's performance/benchmarks.md"
_AWS = "https://github.com/aws-samples/deep-learning-models/issues/2"
_GOYAL = "Goyal et al. 2017, arXiv 1706.02677"

# VGG-16 (Simonyan and Zisserman 2014, arXiv 1409.1556, table 1, column D): channels, and 0 for max pooling.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A family of runs of one network on one kind of machine.

    Attributes:
        alone: images/s (or rows) of the smallest run, which calibrates the others.
        smallest: its job.
        runs: images/s of each other run by its name, and its job.
    """

    name: str
    source: str
    alone: float
    smallest: Job
    runs: dict[str, tuple[float, Job]]


@cache
def vgg16() -> Workload:
    """Of the network for ImageNet, 138,357,544 parameters."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in _VGG16:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()] if outputs else [nn.MaxPool2d(2)]
        inputs = outputs or inputs
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(4096, 1000))
    return trace(model, torch.rand(2, 3, 224, 224), _loss, name="vgg16")


def _loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long))


@cache
def bert_large() -> Workload:
    """Of BERT's larger network with rows of 128 tokens (Devlin et al. 2018, arXiv 1810.04805), by PyTorch's layers.

    Its heads are left out but for the prediction of 20 masked tokens a row.
    """
    return trace(_Bert(), torch.zeros(2, 128, dtype=torch.long), _masked_loss, name="bert-large")


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, 1024)
        self.places = nn.Parameter(torch.empty(128, 1024))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(24)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(rows) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(hidden[:, :20], self.tokens.weight)


def _masked_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows[:, :20].flatten())


def bert() -> Published:
    """Phase 1 on DGX A100 by Horovod, sequences/s; 61,440 rows a step in parts of 60 a GPU are assumed."""
    rates = {2: 7551.0, 8: 29711.0, 32: 110281.0}

    def on(nodes: int) -> Job:
        return Job(
            workload=bert_large(),
            network=stated_network(nodes, adapters=8, bytes_per_s=200e9 / 8),
            local=8,
            device=Device(name="a100-sxm-80", precision="fp16", fused=True),
            engine="horovod",
            batch=61440 / nodes / 8,
            parts=128 // nodes,
            bucket_bytes=64e6,
            wire=0.5,
            state=2,
        )

    return Published(
        name="BERT large, phase 1",
        source="https://github.com/NVIDIA/DeepLearningExamples (TensorFlow2/LanguageModeling/BERT)",
        alone=3804.0,
        smallest=on(1),
        runs={f"BERT large, {8 * nodes} GPUs": (rate, on(nodes)) for nodes, rate in rates.items()},
    )


def horovod(name: str, workload: Workload, alone: float, rates: dict[str, tuple[float, int, bool]]) -> Published:
    """Servers of four P100 with one adapter of 25 Gbit/s, TensorFlow 1, fusion of 64 MB, NCCL 2.0.

    Args:
        alone: images/s of one GPU.
        rates: images/s by name, with the nodes and whether by RDMA.
    """
    smallest = Job(
        workload=workload,
        network=stated_network(1, adapters=1, bytes_per_s=25e9 / 8),
        local=1,
        device=Device(name="p100"),
        engine="horovod",
        batch=64,
        bucket_bytes=64e6,
        trees=False,
    )
    runs = {
        f"{name}, {nodes * 4} GPUs, {run}": (
            rate,
            replace(smallest, network=replace(smallest.network, hosts=nodes), local=4, rdma=rdma),
        )
        for run, (rate, nodes, rdma) in rates.items()
    }
    return Published(name=name, source=f"{_HOROVOD_44}, {_HOROVOD_DOCS}", alone=alone, smallest=smallest, runs=runs)


def horovod_families() -> list[Published]:
    """ResNet-101 and VGG-16 over TCP and RDMA. Those of 512 GPUs are given as an efficiency against one."""
    return [
        horovod(
            "ResNet-101",
            load_workload("resnet101"),
            119.4,
            {"TCP": (1685.1, 4, False), "RDMA": (1746.2, 4, True), "RDMA, docs": (0.90 * 512 * 119.4, 128, True)},
        ),
        horovod(
            "VGG-16",
            vgg16(),
            130.9,
            {"TCP": (1308.7, 4, False), "RDMA": (1787.4, 4, True), "RDMA, docs": (0.68 * 512 * 130.9, 128, True)},
        ),
    ]


def one_kind(
    name: str, source: str, device: Device, alone: tuple[int, float], rates: dict[int, float], **job: Any
) -> Published:
    """ResNet-50 on nodes of one kind: images/s by GPUs, the smallest of which calibrates the others."""
    local, gbit, adapters = job.pop("local"), job.pop("gbit", 100), job.pop("adapters", 1)

    def on(gpus: int) -> Job:
        network = stated_network(max(1, gpus // local), adapters=adapters, bytes_per_s=gbit * 1e9 / 8)
        return Job(workload=load_workload("resnet50"), network=network, local=min(gpus, local), device=device, **job)

    return Published(
        name=name,
        source=source,
        alone=alone[1],
        smallest=on(alone[0]),
        runs={f"{name}, {gpus} GPUs": (rate, on(gpus)) for gpus, rate in rates.items()},
    )


def resnet50_families() -> list[Published]:
    """ResNet-50 where no row of MLPerf is."""
    half = {"engine": "nccl", "batch": 256, "wire": 0.5}
    return [
        one_kind(
            "P100 DGX-1",
            _TENSORFLOW,
            Device(name="p100"),
            (1, 219),
            {2: 422, 4: 852, 8: 1734},
            local=8,
            engine="nccl",
            batch=64,
            trees=False,
        ),
        one_kind(
            "P100, 50 Gbit/s",
            _GOYAL,
            Device(name="p100"),
            (8, 90 * 1281167 / (29 * 3600)),
            {256: 90 * 1281167 / 3600},
            local=8,
            gbit=50,
            engine="nccl",
            batch=32,
        ),
        one_kind(
            "V100 DGX-1, MXNet AMP",
            "MXNet AMP",
            Device(name="v100-sxm", precision="fp16", fused=True),
            (1, 1376),
            {2: 2768, 4: 5357, 8: 10723},
            local=8,
            **half,
        ),
        one_kind(
            "A100 DGX, MXNet AMP",
            "MXNet AMP",
            Device(name="a100-sxm-40", precision="fp16", fused=True),
            (1, 3411),
            {4: 13443, 8: 26674},
            local=8,
            **half,
        ),
        one_kind(
            "A100-80 DGX, PyTorch AMP",
            "PyTorch AMP",
            Device(name="a100-sxm-80", precision="fp16"),
            (1, 2470),
            {8: 16621},
            local=8,
            engine="nccl",
            batch=256,
        ),
        one_kind(
            "V100 DGX-1, PyTorch AMP",
            "PyTorch AMP",
            Device(name="v100-sxm", precision="fp16"),
            (1, 1200),
            {8: 8322},
            local=8,
            engine="nccl",
            batch=256,
        ),
        one_kind(
            "p3.16xlarge",
            _AWS,
            Device(name="v100-sxm", precision="fp16", fused=True),
            (1, 740),
            {8: 5000, 16: 9860, 32: 21300, 64: 37000},
            local=8,
            gbit=25,
            engine="horovod",
            batch=256,
            rdma=False,
        ),
    ]
