"""What hangs together."""

from __future__ import annotations

import numpy as np

from hpctrain.topology.fabric import Ints


def components(nodes: int, source: Ints, target: Ints) -> Ints:
    """The connected component of each node, numbered from 0 in the order of their lowest nodes.

    Args:
        nodes: how many.
        source, target: the ends of each edge; either direction will do.
    """
    label = np.arange(nodes)
    one, other = np.concatenate([source, target]), np.concatenate([target, source])
    while True:
        smaller = label.copy()
        np.minimum.at(smaller, other, label[one])
        # A node takes over what its label's node has found, which halves long chains.
        smaller = smaller[smaller]
        if np.array_equal(smaller, label):
            return np.unique(label, return_inverse=True)[1].astype(np.int32)
        label = smaller
