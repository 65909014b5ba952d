"""All-reduces that no engine of hpctrain uses, as steps of simultaneous flows."""

from __future__ import annotations

import numpy as np

from hpctrain.control.topology.fabric import Ints
from hpctrain.control.topology.routes import Phase, rail_rings


def ring(order: Ints) -> list[Phase]:
    """A ring: reduce-scatter, then all-gather, each n - 1 steps of one n-th of the buffer (Patarasu and Yuan, 2009).

    Args:
        order: adapters, in the order of the ring.
    """
    return rail_rings(order[:, None])


def halving_doubling(order: Ints) -> list[Phase]:
    """Recursive halving, then doubling (Rabenseifner, 2004).

    Of n adapters the first 2 (n - p), with p the largest power of two up to n, are folded into pairs before and
    unfolded after.
    """
    power = 1 << (len(order).bit_length() - 1)
    folded = 2 * (len(order) - power)
    even, odd = order[0:folded:2], order[1:folded:2]
    core = np.concatenate([odd, order[folded:]])
    distances = [1 << bit for bit in reversed(range(power.bit_length() - 1))]
    halving = [
        Phase(source=core, target=core[np.arange(power) ^ distance], share=distance / power) for distance in distances
    ]
    fold = [Phase(source=even, target=odd, share=1.0)] if folded else []
    unfold = [Phase(source=odd, target=even, share=1.0)] if folded else []
    return fold + halving + halving[::-1] + unfold


def hierarchical(groups: Ints) -> list[Phase]:
    """Reduce-scatter inside each group, a ring across groups for each part, all-gather inside each group.

    Where the groups are hosts, and traffic within a host uses no links, this is ``rail_rings``.

    Args:
        groups: adapters' nodes, of shape (groups, members).
    """
    members = groups.shape[1]
    inside = Phase(
        source=groups.ravel(), target=np.roll(groups, -1, axis=1).ravel(), share=1 / members, repeats=members - 1
    )
    return [inside, *rail_rings(groups), inside] if members > 1 else rail_rings(groups)
