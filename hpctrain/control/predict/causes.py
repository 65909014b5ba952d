"""What makes the range of a step's time as wide as it is, and which measurement would narrow it most."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

_ONE_NODE = "time some steps of it on one node: what they took over what is predicted holds for more nodes too"
_TWO_NODES = "time some steps of it on two nodes"
# By the names of constants, the first that fits; for images there are calibrations, for transformers on GPUs none.
_MEASUREMENTS = (
    (r"unstated\.network|network", "state the network: --adapters-per-node and --link, or --fabric"),
    (r"loader\.", "bench loader --json, and --calibration"),
    (r"bus\.|.*\.local_s|host_", "bench allreduce -np N --json on one node, and --calibration"),
    (
        r"(?:tcp\.|horovod\.|mpi\.|gloo\.)?wire_efficiency|nccl_step_s|\w+\.(?:step_s|overlap)|curve_residual|horovod\.",
        "bench allreduce -H HOSTS --json on two nodes, and --calibration",
    ),
    (
        r".*\.(?:pace|\w+flops|memory_bytes_per_s|kernel_s)|torch\.|kernel_s|\w+_efficiency|step_residual|cpu\.",
        "bench step --sweep --json on one node, and --calibration",
    ),
    (r"wire|hop|overlap|pipeline|replicas|stragglers|publishers\.(?:division|gpus)", _TWO_NODES),
    (
        r"attention\.|gpu\.|publishers\.|matmul|power|wave|kernel|fp\d|cast|cudnn|narrow|scores?|score_bytes|memory|eager"
        r"|bus|local|tensor|launch|step",
        _ONE_NODE,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How much of an interval comes from one constant.

    Attributes:
        share: of the variance of the logarithm of the step's time.
        step: by how much of a step's time one standard deviation of it moves it.
        measurement: what would narrow it; empty where nothing is known to.
    """

    name: str
    share: float
    step: float
    measurement: str = ""


def causes_by_size(moves: Mapping[str, float]) -> tuple[Cause, ...]:
    """The causes, the largest first.

    Args:
        moves: by name, by how much one standard deviation moves the logarithm of a step's time.
    """
    whole = max(sum(move**2 for move in moves.values()), 1e-30)
    found = [
        Cause(name=name, share=move**2 / whole, step=abs(move), measurement=_measurement(name))
        for name, move in moves.items()
    ]
    return tuple(sorted(found, key=lambda cause: -cause.share))


def causes_of(values: Values, total: Floats) -> tuple[Cause, ...]:
    """The effect of each constant on the step's time, by a regression of its logarithm on theirs."""
    names = [name for name in sorted(values.used) if name in values.logs and values.logs[name][1:].std() > 0]
    drawn_logs = np.stack([values.logs[name][1:] for name in names])
    centred = drawn_logs - drawn_logs.mean(axis=1, keepdims=True)
    log_total = np.log(total[1:]) - np.log(total[1:]).mean()
    # Ridge regression, because fitted constants are correlated and there are nearly a hundred of them.
    scaled = centred / centred.std(axis=1, keepdims=True)
    slopes = np.linalg.solve(scaled @ scaled.T + np.eye(len(names)), scaled @ log_total)
    return causes_by_size(dict(zip(names, slopes.tolist(), strict=True)))


def best_measurement(causes: Iterable[Cause]) -> tuple[str, float]:
    """The measurement that would narrow the range most, and the share of the variance that it takes away at most."""
    shares: dict[str, float] = defaultdict(float)
    for cause in causes:
        shares[cause.measurement] += cause.share
    shares.pop("", None)
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))


def _measurement(name: str) -> str:
    return next((measurement for pattern, measurement in _MEASUREMENTS if re.match(pattern, name)), "")
