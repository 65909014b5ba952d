"""MLPerf's published ResNet-50 runs as jobs whose step times are predicted. Read by predictions.py."""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.compute import Device
from hpctrain.control.predict.job import Job
from hpctrain.control.predict.network import stated_network

# What a system's description says of its accelerator, as a GPU of ours. Others have no data sheet in hpctrain.
_GPUS = (
    ("A100.*PCI.*80", "a100-pcie-80"),
    ("A100.*PCI", "a100-pcie-40"),
    ("A100.*80", "a100-sxm-80"),
    ("A100", "a100-sxm-40"),
    ("H100.*PCI", "h100-pcie"),
    ("H100", "h100-sxm"),
    ("V100", "v100-sxm"),
    ("A30", "a30"),
    ("L40S", "l40s"),
    ("L40", "l40"),
)
# Adapters of a node for its GPUs and Gbit/s of each: of the makers' descriptions of these systems, else assumed.
_ADAPTERS = (
    ("dgx1", 4, 100),
    ("dgx2", 8, 100),
    ("dgxa100", 8, 200),
    ("ND96amsr_A100", 8, 200),
    ("dgxh100|eos|coreweave|ND_H100", 8, 400),
    ("2opa", 2, 100),
    ("1opa", 1, 100),
    ("", 1, 200),
)
_SUBMITTERS = {"NVIDIA_CoreWeave": "NVIDIA"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of the table.

    Attributes:
        system: what has the same hardware, whatever the nodes: GPU, submitter and model.
        name: of the row.
        batch: images of a GPU in a step.
        seconds: of a step.
    """

    system: tuple[str, str, str]
    name: str
    round: str
    gpu: str
    nodes: int
    local: int
    batch: float
    seconds: float
    adapters: tuple[int, float]

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.local

    def job(self) -> Job:
        """The step that it repeats: MXNet with fused batch normalisation, in float16 with NCCL."""
        count, gbit = self.adapters
        return Job(
            workload=load_workload("resnet50"),
            network=stated_network(self.nodes, adapters=count, bytes_per_s=gbit * 1e9 / 8),
            local=self.local,
            device=Device(name=self.gpu, precision="fp16", fused=True),
            engine="nccl",
            batch=self.batch,
            wire=0.5,
        )


def read_runs(path: Path) -> list[Run]:
    """The rows of GPUs whose data sheets hpctrain has, smallest first."""
    found = []
    seen = set()
    for row in csv.DictReader(path.open()):
        gpu = next((name for pattern, name in _GPUS if re.search(pattern, row["accelerator"], re.I)), None)
        # One run was submitted to two rounds.
        same = (row["system"], row["minutes_score"], row["images_per_s_blocks"])
        if gpu is None or same in seen:
            continue
        seen.add(same)
        nodes, local = int(row["nodes"]), int(row["accelerators_per_node"])
        submitter = _SUBMITTERS.get(row["submitter"], row["submitter"])
        adapters = next((count, gbit) for pattern, count, gbit in _ADAPTERS if re.search(pattern, row["system"]))
        found.append(
            Run(
                system=(gpu, submitter, _model(row["system"])),
                name=f"{row['round']} {submitter} {row['system']}",
                round=row["round"],
                gpu=gpu,
                nodes=nodes,
                local=local,
                batch=int(row["global_batch"]) / nodes / local,
                seconds=int(row["global_batch"]) / float(row["images_per_s_blocks"]),
                adapters=adapters,
            )
        )
    return sorted(found, key=lambda run: (run.system, run.gpus, run.round))


def _model(system: str) -> str:
    """The name without numbers of nodes and GPUs, and without versions of software."""
    system = re.sub(r"^(eos|coreweave_hgxh100)", "dgxh100", system)
    for pattern, kept in (
        (r"^\d+x(?=[A-Z])", ""),
        (r"^\d+(?=R\d)", ""),
        (r"_n\d+(?=_|$)", ""),
        (r"[_-]?ngc[\d.]+|[_-]mxnet", ""),
        (r"-A100x\d+", "-A100"),
        (r"(V7)x\d+x?(?=[AL]\d)", r"\1-"),
    ):
        system = re.sub(pattern, kept, system)
    return system


def by_system(runs: Iterable[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """The runs of each system, smallest first."""
    found = defaultdict(list)
    for run in runs:
        found[run.system].append(run)
    return dict(found)


def smallest(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """A system's smallest runs, which have two batches a GPU or, where all have one, two sizes; and the others."""
    batches = {run.batch for run in runs}
    for count in range(2, len(runs)):
        known = runs[:count]
        if len({run.batch for run in known}) == 2 or (len(batches) == 1 and len({run.gpus for run in known}) == 2):
            return known, runs[count:]
    return runs, []


def pooled_line(others: Sequence[Run], batch: float) -> float | None:
    """A stronger baseline: t(b) = a + c b with a and c above 0, closest to all these runs in relative terms.

    Each system counts as much as any other. None without runs of two batches.
    """
    if len({run.batch for run in others}) < 2:
        return None
    counts = Counter(run.system for run in others)
    weights = np.array([counts[run.system] ** -0.5 / run.seconds for run in others])
    columns = np.array([(1.0, run.batch) for run in others]) * weights[:, None]
    (fixed, per_image), _ = nnls(columns, weights * [run.seconds for run in others])
    return float(fixed + per_image * batch)


def line(known: list[Run], batch: float) -> float:
    """The baseline: t(b) = a + c b through the smallest runs, through 0 where they have one batch."""
    means: dict[float, list[float]] = defaultdict(list)
    for run in known:
        means[run.batch].append(run.seconds)
    points = sorted((each, sum(times) / len(times)) for each, times in means.items())
    (low, first), (high, second) = (points[0], points[-1]) if len(points) > 1 else ((0.0, 0.0), points[0])
    slope = (second - first) / (high - low)
    return first + slope * (batch - low)
