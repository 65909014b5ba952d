"""How long a GPU, or the cores of a host, computes one step: a roofline over the layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.workloads.workload import Workload
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

Precision = Literal["float32", "bf16", "fp16"]
Software = Literal["eager", "compiled"]

CPU = "cpu"
"""The device that is all cores of a host, which its ranks share."""

# Bytes that an update reads and writes for each parameter: itself, its gradient and the optimizer's state, in float32.
_UPDATE_BYTES = {0: 12, 1: 20, 2: 28}


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device on which one rank computes.

    Attributes:
        ranks: the number of ranks that share it.
        crowded: how often the ranks that share it are twice as many as those that a sweep was measured with.
        polled: whether each rank has a thread of its engine that polls, which takes time from the cores.
        fused: whether chains of elementwise operators are one kernel with what makes their input, as a compiler does.
        software: how PyTorch runs the network on a GPU; None for the fused kernels of MXNet that ``pace`` is fitted to.
    """

    name: str
    ranks: int = 1
    precision: Precision = "float32"
    crowded: float = 0.0
    polled: bool = False
    fused: bool = False
    software: Software | None = None

    @property
    def fuses(self) -> bool:
        """Whether it has fewer kernels than operators."""
        return self.fused or self.software == "compiled"


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds of one step on one rank, (columns,) each.

    Attributes:
        backward: of the backward pass of each layer, the last layer first, (layers, columns).
        busy: the part of all that in which the device is full, without the gaps between kernels.
    """

    forward: Floats
    backward: Floats
    update: Floats
    busy: Floats

    @property
    def total(self) -> Floats:
        """The sum of all passes, one after the other."""
        total: Floats = self.forward + self.backward.sum(axis=0) + self.update
        return total


def compute(workload: Workload, batch: float, device: Device, values: Values, *, state: int = 1) -> Compute:
    """The times of one step with so many samples at once, by an optimizer that keeps ``state`` numbers a parameter.

    Each pass of each layer takes as long as its arithmetic or its traffic with the memory, whichever is longer, and
    the time in which a kernel begins and ends (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785).
    """
    forward = _passes(workload, batch, device, values, back=False)
    backward = _passes(workload, batch, device, values, back=True)[::-1]
    pace = values[f"{device.name}.pace"] * device.ranks
    if device.software:
        pace = pace * values[f"torch.{device.software}"]
    if device.crowded:
        pace = pace * values["cpu.crowding"] ** device.crowded
    if device.polled:
        pace = pace * values["horovod.polling"]
    traffic = values[f"{device.name}.memory_bytes_per_s"] * values["memory_efficiency"]
    update = _UPDATE_BYTES[state] * workload.parameters / traffic * pace
    gap = values["cpu.kernel_s" if device.name == CPU else "kernel_s"]
    launched = len(workload.layers) if device.fuses else sum(workload.columns["operators"])
    backward_launched = np.array(workload.columns["backward_operators"])[::-1]
    found = Compute(
        forward=forward.sum(axis=0) * pace + launched * gap,
        backward=backward * pace + backward_launched[:, None] * gap,
        update=update + gap,
        busy=(forward.sum(axis=0) + backward.sum(axis=0)) * pace + update,
    )
    if device.software != "eager":
        return found
    # Python starts each operator, which for small batches takes longer than the GPU does.
    starting = (launched + sum(backward_launched)) * values["torch.operator_s"]
    slower = np.maximum(1.0, starting / found.total)
    return replace(
        found, forward=found.forward * slower, backward=found.backward * slower, update=found.update * slower
    )


def _passes(workload: Workload, batch: float, device: Device, values: Values, *, back: bool) -> Floats:
    """Seconds of one pass of each layer by the roofline, (layers, columns)."""
    back_, fused = "backward_" if back else "", "fused_" if device.fuses else ""
    flops, moved, fixed = (
        np.array(workload.columns[key])
        for key in (f"{back_}flops", f"{fused}{back_}elements", f"fixed_{back_}elements")
    )
    kinds = np.array([layer.kind for layer in workload.layers])
    arithmetic = np.zeros((len(kinds), values.columns))
    for kind in ("conv", "matmul"):
        arithmetic[kinds == kind] = (flops[kinds == kind] * batch)[:, None] / _rate(kind, device, values)
    size = 4 if device.precision == "float32" else 2
    bandwidth = values[f"{device.name}.memory_bytes_per_s"] * values["memory_efficiency"]
    seconds: Floats = np.maximum(arithmetic, ((moved * batch + fixed) * size)[:, None] / bandwidth)
    return seconds


def _rate(kind: str, device: Device, values: Values) -> Floats:
    """FLOP/s of a kind of layer, (columns,)."""
    narrow = device.precision != "float32"
    if device.precision == "bf16" and device.name != CPU:
        narrow = gpu(device.name).bfloat16
    float32 = "conv32_flops" if kind == "conv" else "vector_flops"
    peak = values[f"{device.name}.{'half_flops' if narrow else float32}"]
    rate: Floats = peak * values[f"{kind}_efficiency"]
    return rate
