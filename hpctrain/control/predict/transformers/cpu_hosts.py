"""The rates of a transformer's step on ranks that share the cores of hosts.

The step is the one of GPUs with other constants: all that ranks send is visible, because the cores that would compute
meanwhile move the bytes. A sweep of ``bench step`` on one rank measures the cores, ``bench allreduce`` the engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.recipes.gpt import BENCHED
from hpctrain.control.predict.collectives import Ranks, allreduce
from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.constants import constants
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.rates import System, step_constants, step_file
from hpctrain.control.predict.transformers.step import predict_step
from hpctrain.control.predict.values import Values, drawn

if TYPE_CHECKING:
    from hpctrain.control.predict.calibration import Calibration
    from hpctrain.control.predict.curves import Curve
    from hpctrain.control.predict.network import Network
    from hpctrain.control.predict.sweep import Sweep
    from hpctrain.control.topology.fabric import Floats

BENCH_MODEL = "gpt"
"""The network of ``hpctrain bench step`` whose sweeps calibrate."""

# Operators of a layer's forward pass, as ``launch`` counts them for GPUs, for each of its matrix products.
_OPERATORS = 60 / 4
# Bytes of a parameter that SGD with momentum moves, with which a sweep's steps end, against AdamW's.
_SGD = 20 / 28
# A row's range is made of so many draws: each is a step of its own.
_DRAWS = 100


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts whose cores the ranks share.

    Attributes:
        local: ranks of a host.
        cores: of a host; None where no sweep says how many, and each rank then has one at least.
        measured: ranks of a host that the sweeps had.
        curves: all-reduces that were measured.
    """

    local: int
    engine: str
    values: Values
    cores: int | None = None
    measured: int = 1
    curves: Sequence[Curve] = ()

    @classmethod
    def of(cls, calibration: Calibration, *, local: int, engine: str, precision: str) -> Hosts:
        """Hosts as they were measured.

        Raises:
            HpctrainError: a sweep of another network, of GPUs, or in another precision.
        """
        calibration.require_fits(BENCH_MODEL, CPU, precision)
        names = (_rate_of(precision), "cpu.memory_bytes_per_s", "cpu.kernel_s")
        fitted = calibration.fit(constants(), modelled=_swept_seconds, names=names)
        return cls(
            local=local,
            engine=engine,
            values=drawn(fitted.constants, fitted=fitted.columns(_DRAWS), count=_DRAWS),
            cores=next((sweep.cores for sweep in calibration.sweeps if sweep.cores), None),
            measured=max((sweep.ranks for sweep in calibration.sweeps), default=local),
            curves=calibration.curves,
        )

    @property
    def crowd(self) -> float:
        """Ranks for each core; at least 1."""
        return max(1.0, self.local / (self.cores or self.local))

    def value(self, name: str, column: int) -> float:
        """A constant in one draw."""
        return float(self.values[name][column])

    def system(self, network: Network, column: int = 0) -> HostSystem:
        """What a rank has of its host."""
        crowded = max(0.0, math.log2(self.local / self.measured))
        pace = self.local * self.value("cpu.crowding", column) ** crowded
        efficiency = self.value("matmul_efficiency", column)
        flops = {name: self.value(_rate_of(name), column) * efficiency / pace for name in ("float32", "bf16", "fp16")}
        memory = self.value("cpu.memory_bytes_per_s", column) * self.value("memory_efficiency", column)
        return HostSystem(
            name=CPU,
            flops=flops,
            memory_bytes_per_s=memory / pace,
            # Its constants are replaced by those of cores below.
            generation="ampere",
            watts=0.0,
            bus=(),
            joined=self.local,
            network_bytes_per_s=0.0,
            hosts=self,
            network=network,
            column=column,
        )


@dataclass(frozen=True, kw_only=True)
class HostSystem(System):
    """What a rank computes and sends, in one draw of the constants."""

    hosts: Hosts
    network: Network
    column: int

    def constants(self, layout: Layout) -> Mapping[str, float]:
        """Those of GPUs where they are about bytes and operators, and the hosts' own."""
        value, column = self.hosts.value, self.column
        # What FSDP2 and tp each do in Python besides. FSDP2 also reduces the gradients of copies of a divided model.
        besides, pp = 0.0, layout.sizes["pp"]
        if layout.mesh.data_ranks > 1 and (layout.zero == 3 or layout.sizes["tp"] * pp > 1):
            besides += value("cpu.sharded_layer", column) - 1
        if layout.sizes["tp"] > 1:
            besides += value("cpu.tensor_layer", column) - 1
        gap = value("cpu.kernel_s", column) * self.hosts.crowd * (1 + besides)
        step = value("cpu.step_s", column) + (value("cpu.pipeline_s", column) if pp > 1 else 0.0)
        pace = 1 / value("cpu.transformer", column) / value("step_residual", column)
        return {
            **step_constants(),
            "matmul": 1.0,
            "wave": 0.0,
            "kernel": gap * _OPERATORS,
            "attention.ampere": 0.5,
            "launch": 0.0,
            "step": step * self.hosts.crowd,
            "overlap": 1.0,
            "replicas": 1.0,
            "tensor": 1.0,
            "pipeline": 1.0,
            # As the slowest of two ranks is half a standard deviation late, and that of four is one.
            "stragglers": value("cpu.jitter", column) / 2,
            **{f"software.{name}": pace for name in step_file().software},
        }

    def ring(
        self, share: float, size: int, stride: int, nbytes: float, values: Mapping[str, float]
    ) -> tuple[float, float]:
        """By the time of an all-reduce, whose two halves are a gather and a scatter; a host's groups take turns."""
        local = max(1, min(size, self.joined // stride))
        ranks = Ranks(
            network=replace(self.network, hosts=-(-size // local)), local=local, device=CPU, engine=self.hosts.engine
        )
        one = float(allreduce(nbytes, ranks, self.hosts.values, self.hosts.curves)[self.column])
        return 2 * (size - 1) / size * nbytes / (one * max(1, self.joined // local)), 0.0

    def own_cores(self, stages: int) -> float:
        """A pipeline's part of the cores."""
        return stages / self.hosts.crowd


def _rate_of(precision: str) -> str:
    return "cpu.vector_flops" if precision == "float32" else "cpu.half_flops"


def _swept_seconds(sweep: Sweep, batch: float, values: Values) -> Floats:
    """Seconds of a step of a sweep, (columns,)."""
    hosts = Hosts(local=sweep.ranks, engine="single", values=values, cores=sweep.cores, measured=sweep.ranks)
    layout = Layout(
        micro_batch=int(batch), zero=0, kernels="eager", precision=sweep.precision, divided_vocabulary=False
    )
    network = stated_network(1, adapters=1, bytes_per_s=1e9)
    found = []
    for column in range(values.columns):
        step = predict_step(BENCHED.transformer, layout, hosts.system(network, column), software="hpctrain")
        # A plain loop, without what a recipe's step has besides.
        found.append(step.seconds - step.terms["step"] - (1 - _SGD) * step.terms["update"])
    return np.array(found)
