"""Which algorithm NCCL chooses for an all-reduce.

The formulas and constants of ring and tree are those of its tuner, src/graph/tuning.cc of NCCL 2.30
(https://github.com/NVIDIA/nccl), which ranks algorithms: without its table of corrections and its limits for each
channel, and without NVLS and CollNet. They are not the times that it then takes, and other versions have other
constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpctrain.common.cluster.gpu_models import Bus
    from hpctrain.control.predict.network import Network

TUNER_VERSION = (2, 30)
"""The version of NCCL that the constants are from."""

# The first with trees (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
_FIRST_TREES = (2, 4)

Algorithm = Literal["ring", "tree"]
_Protocol = Literal["ll", "ll128", "simple"]

# Microseconds.
_BASE: dict[Algorithm, dict[_Protocol, float]] = {
    "tree": {"ll": 6.8, "ll128": 14.0, "simple": 8.4},
    "ring": {"ll": 6.6, "ll128": 14.0, "simple": 8.4},
}
_LOCAL: dict[str, dict[Algorithm, dict[_Protocol, float]]] = {
    "nvlink": {
        "tree": {"ll": 0.6, "ll128": 1.25, "simple": 4.0},
        "ring": {"ll": 0.6, "ll128": 1.9, "simple": 3.4},
    },
    "pcie": {"tree": {"ll": 1.0, "ll128": 1.9, "simple": 4.0}, "ring": {"ll": 1.0, "ll128": 2.5, "simple": 5.7}},
}
_NETWORK: dict[Algorithm, dict[_Protocol, float]] = {
    "tree": {"ll": 5.0, "ll128": 8.5, "simple": 14.0},
    "ring": {"ll": 2.7, "ll128": 4.0, "simple": 14.0},
}
_RING_SHARE: dict[_Protocol, float] = {"ll": 0.5, "ll128": 0.92, "simple": 1.0}
_TREE_BUS = 0.92


def choose_algorithm(
    nbytes: float, *, local: int, bus: Bus, network: Network, version: tuple[int, int] = TUNER_VERSION
) -> Algorithm:
    """The algorithm with the least time by the tuner's own count.

    Args:
        version: of NCCL; those before 2.4 have rings alone.
    """
    if network.hosts == 1 or version < _FIRST_TREES:
        return "ring"
    times = {
        algorithm: min(
            tuner_seconds(nbytes, algorithm, protocol, local=local, bus=bus, network=network)
            for protocol in _RING_SHARE
        )
        for algorithm in _BASE
    }
    return min(times, key=lambda algorithm: times[algorithm])


def tuner_seconds(
    nbytes: float, algorithm: Algorithm, protocol: _Protocol, *, local: int, bus: Bus, network: Network
) -> float:
    """The tuner's estimate for one algorithm and protocol, in seconds."""
    nodes = network.hosts
    ranks = nodes * local
    rate = min(bus.points[-1][1], network.rails * network.rail_bytes_per_s)
    within, between = _LOCAL[bus.latency][algorithm][protocol], _NETWORK[algorithm][protocol]
    if algorithm == "ring":
        latency = (2 * (ranks - 1) - 2 * (nodes - 1)) * within + 2 * (nodes - 1) * between
        bandwidth = rate * _RING_SHARE[protocol] * ranks / (2 * (ranks - 1))
    else:
        latency = 2 * ((local - 1) * within + (nodes - 1).bit_length() * between)
        share = {"ll": 1 / 3.8, "ll128": 120 / 128, "simple": 1.0}[protocol]
        bandwidth = rate * _TREE_BUS * share / 2
    return (_BASE[algorithm][protocol] + latency) * 1e-6 + nbytes / bandwidth
