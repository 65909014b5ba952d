"""The time of an all-reduce over a network, one at a time, by the plain formulas."""

from __future__ import annotations

from hpctrain.control.predict.network import Network


def ring_seconds(
    network: Network,
    nbytes: float,
    *,
    ranks_per_host: int = 1,
    latency_s: float = 0.0,
) -> float:
    """Seconds of an all-reduce by rings: 2 (n - 1) steps, each of one n-th of the rail's part.

    Args:
        ranks_per_host: n is the number of all ranks if rings go through each rank of a host before they leave it,
            as NCCL's do; that of the hosts where one rank a rail has the sum of its host.
        latency_s: of a small message between two hosts.
    """
    if network.hosts == 1:
        return 0.0
    ranks = network.hosts * ranks_per_host
    return (
        2 * (network.hosts - 1) * latency_s
        + 2 * (ranks - 1) / ranks * _rail_seconds(network, nbytes) / network.ring_share
    )


def tree_seconds(network: Network, nbytes: float, *, piece_bytes: float = 0.0, latency_s: float = 0.0) -> float:
    """Seconds of an all-reduce by two trees: up and down their height, and the bytes of the busiest link.

    The first piece goes up and down before all links are busy: a host takes it from two children and gives it to
    two, which share its cable, except at the root, so that it takes the time of 4 h - 2 pieces for a height h; it
    counts among the 4 pieces that an adapter moves at a time. This is exact without contention (benchmarks/
    collectives.py). Where another link is the busiest, it has work meanwhile.

    Args:
        piece_bytes: of the pieces that the trees pass on.
        latency_s: of a small message between two hosts.
    """
    if network.hosts == 1:
        return 0.0
    height = (network.hosts - 1).bit_length()
    piece = min(piece_bytes, nbytes / network.rails / 2) / network.rail_bytes_per_s
    filling = max(0, 4 * height - 6) * piece * network.tree_share
    return 2 * height * latency_s + filling + network.tree_volume * _rail_seconds(network, nbytes) / network.tree_share


def _rail_seconds(network: Network, nbytes: float) -> float:
    return nbytes / network.rails / network.rail_bytes_per_s
